"""Layers compiled ahead: a process of its own fills torch's caches on disk, from which this one then loads their code.

Tracing and compiling take seconds, in which a thread would hold up every step. The process builds the model's first
layers from its config, with random weights, and compiles them (`compile_ahead`). It reads no checkpoint. It ends with
this process, however that ends: it waits at the end of a pipe.
"""

import hashlib
import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from turbo_hf._version import __version__
from turbo_hf.errors import Unsupported
from turbo_hf.models.versions import version_of

PROGRAM = "turbo_hf.graphs.compile_ahead"

DEVICES = ("cuda",)
"""Kinds of devices for which layers are compiled ahead."""

SPARE = 3
"""GiB that must be free on a GPU: 0.6 for CUDA itself, and for layers with their weights."""

Job = dict[str, Any]


def described(layer: torch.nn.Module) -> str:
    """A word for what compiled code depends on of a layer: its modules, and the kinds of its weights."""
    kinds = [(name, type(x.data), x.dtype, *x.shape, x.requires_grad) for name, x in layer.named_parameters()]
    return hashlib.sha256(f"{layer!r} {kinds}".encode()).hexdigest()


def job_of(model: Any, layers: Sequence[torch.nn.Module], rows: int) -> Job:
    """What the process needs to know: the config of a model of the first layers, up to the last one of a new kind."""
    kinds = list(map(described, layers))
    count = 1 + max(map(kinds.index, kinds))
    config = json.loads(model.config.get_text_config(decoder=True).to_json_string(use_diff=False))
    # lists with an entry for each layer
    config = {name: x[:count] if isinstance(x, list) and len(x) == len(kinds) else x for name, x in config.items()}
    # embeddings are not compiled
    config |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "_name_or_path"))
    config |= {"num_hidden_layers": count, "vocab_size": 64}
    return {
        "config": config,
        "layers": kinds[:count],
        "device": str(model.device),
        # a part of the keys of torch's caches, as is the precision
        "current": torch.cuda.current_device() if model.device.type == "cuda" else -1,
        "dtype": str(model.dtype).removeprefix("torch."),
        "gradients": next(layers[0].parameters()).requires_grad,
        "rows": rows,
        "inference": torch.is_inference_mode_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }


def mark_of(job: Job) -> Path:
    """The file that tells, beside torch's caches, that this has been compiled here."""
    name = torch.cuda.get_device_name(job["device"]) if job["device"].startswith("cuda") else job["device"]
    words = [json.dumps(job, sort_keys=True), name, torch.__version__, str(version_of("transformers")), __version__]
    return Path(cache_dir()) / "turbo_hf" / hashlib.sha256("\n".join(words).encode()).hexdigest()


class Ahead:
    """The process that compiles ahead for one model, at most one at a time.

    process: the one that does now.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self._end: Any = None

    def stop(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self.process = None

    def done(self, job: Job) -> bool:
        """Whether the code of this job is on disk. If not, a process begins to compile it, unless one is at work.

        Raises:
            Unsupported: it cannot be compiled ahead; the message says why.
        """
        process = self.process
        if process is None:
            kind = torch.device(job["device"]).type
            if kind not in DEVICES:
                raise Unsupported(f"the model is on {job['device']}")
            if inductor_config.force_disable_caches:
                raise Unsupported("torch's caches on disk are off")
            try:
                mark = mark_of(job)
                there = mark.exists()
                if not there:
                    if kind == "cuda" and torch.cuda.mem_get_info(job["device"])[0] < SPARE << 30:
                        raise Unsupported(f"less than {SPARE} GiB of {job['device']} are free")
                    mark.parent.mkdir(exist_ok=True)
                    self._start({**job, "mark": str(mark)})
            except OSError as error:
                raise Unsupported(f"no process can compile them ahead: {error}") from error
            return there
        if process.poll() is None:
            return False
        assert process.stdout is not None
        said, code = process.stdout.read().strip(), process.returncode
        self.stop()
        if code:
            raise Unsupported(f"compiled ahead, they failed: {said or f'the process ended with {code}'}")
        return mark_of(job).exists()

    def _start(self, job: Job) -> None:
        # packages are looked for where this process looks for them
        program = f"import sys; sys.path[:] = {sys.path!r}; from {PROGRAM} import main; main()"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # in a session of its own, so that Ctrl-C is for this process alone
        process = subprocess.Popen([sys.executable, "-c", program], **pipes, text=True, start_new_session=True)
        self.process, self._end = process, weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
