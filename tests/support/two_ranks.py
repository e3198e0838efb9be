"""One rank of a tensor parallel model of two: what `test_ranks.py` asks of it, as JSON.

    python two_ranks.py RANK FOLDER cpu|cuda [CASE ...]

FOLDER holds checkpoints by name; what the rank has seen of these cases, or of all, goes to FOLDER/RANK.json.
"""

import copy
import functools
import warnings
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calibration_support import PROSE_FILE, SMALL
from choices import flat_config
from graphs_support import an_index
from models import LAB_MODEL, prompts, tiny_llama
from ranks_support import COUNT, error_of, run_rank, stand_ins
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig
from typer.testing import CliRunner

import turbo_hf
from turbo_hf import Calibration, SparseConfig, TurboConfig
from turbo_hf.calibration.choice import uses_calibration
from turbo_hf.calibration.run import calibrate
from turbo_hf.calibration.widths import Widths
from turbo_hf.cli.main import app
from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.models.versions import CACHE
from turbo_hf.ranks import Ranks

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}
CONFIGS = {
    "int8": flat_config(bits=8, block_size=32),
    "turbo4": flat_config(block_size=32),
    "turbo-mixed": flat_config(low_bits=2, low_heads=0.5, block_size=32),
    "turbo2": flat_config(bits=2, block_size=32),
    "turbo-k4v3": flat_config(value_bits=3, block_size=32),
    "turbo-k4v2": flat_config(value_bits=2, block_size=32),
    "calibrated": flat_config(layer_bits="calibrated", block_size=32),
    "saap": flat_config(block_size=32, sparse=SparseConfig(sink_tokens=4, window_tokens=16, probes=2)),
}
NEW = 24


def calibration_of(model: Any, seed: int = 5) -> Calibration:
    """Of a whole or a split model: on either rank the odd heads need their bits least; an index of 16 buckets."""
    found = an_index(model, seed=seed)
    ranked = torch.tensor([3.0, 1.0, 4.0, 2.0][: model.config.num_key_value_heads])
    layers = tuple(replace(at, scores={metric: ranked.clone() for metric in HEAD_METRICS}) for at in found.layers)
    widths = Widths(tuple(((8, 3), (3, 4))[at.index % 2] for at in layers), 4.5, 0.0, 0)
    return replace(found, layers=layers, widths=widths)


def answer(model: Any, config: TurboConfig, **options: Any) -> tuple[list[Any], Any, Any]:
    """Tokens of one patched `generate` over two rows; the report and the memory of the patch."""
    calibration = calibration_of(model) if uses_calibration(config) else None
    ids = prompts(2, 70).to(model.device)
    with turbo_hf.patch(model, config, calibration=calibration, **options) as handle:
        tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False)[:, 70:]
        return tokens.tolist(), handle.report(), handle.memory()


class Rank:
    """What one rank is asked. Every method that is public is a case; both ranks run them in the same order."""

    def __init__(self, rank: int, folder: Path, device: str):
        self.rank, self.folder, self.device = rank, folder, device
        self.dtype = torch.float64 if device == "cpu" else torch.float32
        self.llama = self.load("llama")

    def load(self, name: str, dtype: torch.dtype | None = None) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.folder / name, dtype=dtype or self.dtype, distributed_config=DistributedConfig(tp_size=COUNT)
        ).eval()

    def presets(self) -> Any:
        found = {}
        for name, config in CONFIGS.items():
            tokens, report, memory = answer(self.llama, config)
            # what sparse steps read is counted for the heads of each rank
            words = str(replace(report, selectivity=()))
            found[name] = {"tokens": tokens, "report": words, "bytes": memory.by_kind}
        return found

    def checked(self) -> Any:
        # of random weights, whose distributions 4 bit moves far
        tokens = answer(self.llama, CONFIGS["turbo4"], check=True, strict="fallback")[0]
        return [tokens, error_of(self._too_coarse)]

    def _too_coarse(self) -> Any:
        return turbo_hf.patch(self.llama, flat_config(cuda_graphs=True, backend="reference"), check=True)

    def families(self) -> Any:
        """Plans of other kinds: fused keys that are split, and plans that gather heads again."""
        found = {}
        for name in ("gpt_neox", "olmo2", "phi3", "qwen2"):
            model = self.load(name)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                tokens, report, memory = answer(model, CONFIGS["turbo4"])
            said = [str(x.message) for x in told if "turbo_hf" in x.filename or "two_ranks" in x.filename]
            found[name] = {
                "tokens": tokens,
                "layers": [at.storage + " balanced" * at.balanced for at in report.layers],
                "notes": list(report.warnings),
                "warned": said,
                "bytes": memory.by_kind,
            }
        return found

    def refused(self) -> Any:
        """Sentences, which must be the same on both ranks."""
        one = self.rank == 1
        other = calibration_of(self.llama, seed=7 if one else 5)
        mixed, broken = CONFIGS["turbo-mixed"], self.folder / "not-there.json"
        return {
            "configs": error_of(lambda: turbo_hf.patch(self.llama, "int8" if one else "turbo4")),
            "file": error_of(lambda: turbo_hf.patch(self.llama, broken if one else "turbo4")),
            "strict": error_of(lambda: turbo_hf.patch(self.llama, "turbo4", strict="raise" if one else "warn")),
            "calibrations": error_of(lambda: turbo_hf.patch(self.llama, mixed, calibration=other)),
            "missing": error_of(
                lambda: turbo_hf.patch(self.llama, CONFIGS["saap"], calibration=None if one else other)
            ),
            "heads": error_of(lambda: turbo_hf.patch(self.load("three"), "turbo4")),
            "twice": error_of(self._twice),
            "otherwise": error_of(self._split_otherwise),
        }

    def _twice(self) -> None:
        """One rank alone has a model that looks patched."""
        with turbo_hf.patch(self.llama):
            if self.rank == 0:
                held, self.llama._forward_pre_hooks = self.llama._forward_pre_hooks, {}
            try:
                turbo_hf.patch(self.llama)
            finally:
                if self.rank == 0:
                    self.llama._forward_pre_hooks = held

    def _split_otherwise(self) -> None:
        model = tiny_llama()
        mesh = init_device_mesh(self.device, (COUNT,))
        projection = model.model.layers[0].self_attn.k_proj
        projection.weight = torch.nn.Parameter(distribute_tensor(projection.weight, mesh, [Shard(0)]))
        turbo_hf.patch(model)

    def nan(self) -> Any:
        """NaN among the keys of one rank's heads, in the last layer: no other layer or rank sees it by itself."""
        weight = self.llama.model.layers[-1].self_attn.k_proj.weight.detach().to_local()
        before = weight.clone()
        found = []
        if self.rank == 1:
            weight[0] = torch.nan
        found.append(error_of(lambda: answer(self.llama, CONFIGS["turbo4"])))
        weight.copy_(before)
        return [*found, answer(self.llama, CONFIGS["turbo4"])[0]]

    def copies(self) -> Any:
        """A cache that is copied goes on like the first; one of the user's own is known to the ranks, too."""
        ids = prompts(1, 40).to(self.llama.device)
        with turbo_hf.patch(self.llama, CONFIGS["turbo4"]) as handle, torch.no_grad():
            caches = [handle.new_cache(), turbo_hf.TurboCache(self.llama.config, CONFIGS["turbo4"])]
            for cache in caches:
                self.llama(ids, **{CACHE: cache})
            caches.append(copy.deepcopy(caches[0]))
            return [self.llama(ids[:, :9], **{CACHE: x}).logits.argmax(-1).tolist() for x in caches]

    def calibrated(self) -> Any:
        """By both ranks, of which the first writes; then again, where one is."""
        model = self.load(str(LAB_MODEL))
        tokenizer = AutoTokenizer.from_pretrained(LAB_MODEL)
        learn = functools.partial(calibrate, model, tokenizer, PROSE_FILE, settings=SMALL)
        learn(out=self.folder / "learnt")
        return [error_of(lambda: learn(out=self.folder / "learnt"))]

    def graphs(self) -> Any:
        """Steps that are captured as the config demands, steps of "auto", and a capture that fails on one rank."""
        config = replace(CONFIGS["turbo4"], cuda_graphs=True)
        # no kernel serves float64
        model = self.load("llama", torch.float32)
        found: dict[str, Any] = {"eager": answer(model, replace(config, cuda_graphs=False))[0]}
        for case, asked in (
            ("captured", config),
            ("auto", CONFIGS["turbo4"]),
            ("compiled", replace(config, compile=True)),
        ):
            with stand_ins(self.device) as made:
                tokens, report, _ = answer(model, asked)
                found[case] = {"tokens": tokens, "captures": [x.captures for x in made], "steps": report.steps}
        with stand_ins(self.device, "out of something" if self.rank == 1 else ""):
            found["failed"] = error_of(lambda: answer(model, config))
        with stand_ins(self.device, "out of something" if self.rank == 0 else ""):
            found["failed auto"] = answer(model, CONFIGS["turbo4"])[0]
        with stand_ins(self.device) as made, ExitStack() as hooked:
            if self.rank == 1:
                hooked.callback(model.lm_head.register_forward_hook(lambda *_: None).remove)
            found["hooked"] = [answer(model, CONFIGS["turbo4"])[0], sum(x.captures for x in made)]
            found["hooked and demanded"] = error_of(lambda: answer(model, config))
        weight = model.model.layers[-1].self_attn.v_proj.weight.detach().to_local()
        before = weight.clone()
        with stand_ins(self.device), turbo_hf.patch(model, config):
            found["nan"] = error_of(lambda: self._nan_while_replaying(model, weight))
        weight.copy_(before)
        return found

    def _nan_while_replaying(self, model: Any, weight: Any) -> None:
        """Values of one rank's heads become NaN in the midst of steps."""

        def spoil(ids: Any, scores: Any) -> Any:
            if ids.shape[1] == 80 and self.rank == 1:
                weight[0] = torch.nan
            return scores

        model.generate(prompts(2, 70).to(model.device), max_new_tokens=60, do_sample=False, logits_processor=[spoil])

    def absent(self) -> str:
        """A rank that the other one waits for in vain. On a GPU the wait is that of NCCL, which ends the process."""
        group = dist.new_group([*range(COUNT)], timeout=timedelta(seconds=1)) if self.device == "cpu" else None
        found = ""
        if group is not None and self.rank == 0:
            found = error_of(lambda: Ranks(0, COUNT, group, torch.device("cpu")).most(torch.ones(1)))
        dist.barrier()
        return found

    def commands(self) -> Any:
        """The command line, as torchrun starts it; last, as it silences all but the first rank."""
        words = ["generate", str(LAB_MODEL), "The number is", "--max-new-tokens", "8", "--json"]
        bench = ["bench", "generate", "--tiny", "--new", "4", "--context", "32", "--rounds", "1", "--json"]
        out = self.folder / "calibrated"
        learn = ["calibrate", words[1], "--texts", str(PROSE_FILE), "--out", str(out), "--heads-only"]
        learn += ["--window", "256", "--windows", "2"]
        good = (words, bench, ["plan", words[1]], learn, ["doctor", words[1], "--json"])
        calls = (*good, ["demo"], [*words[:2], "-"], ["bench", "decode"], learn)
        ran = [CliRunner().invoke(app, call) for call in calls]
        return [[result.exit_code, result.stdout, result.stderr, repr(result.exception)] for result in ran]


def main() -> None:
    run_rank(Rank, lambda device: [name for name in vars(Rank) if not name.startswith("_") and name != "load"])


if __name__ == "__main__":
    main()
