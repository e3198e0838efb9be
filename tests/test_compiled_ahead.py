"""`TurboConfig(compile="auto")`: a process of its own compiles layers ahead, and steps take over when that pays."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import answer, ragged
from models import SHAPE, prompts, tiny_llama
from torch._inductor import config as inductor_config
from transformers import AutoConfig, AutoModelForCausalLM

import turbo_hf
from turbo_hf.errors import Unsupported
from turbo_hf.graphs import ahead, compiled_layers
from turbo_hf.graphs.ahead import Ahead, described, job_of, mark_of
from turbo_hf.graphs.compile_ahead import compile_ahead
from turbo_hf.graphs.compiled_layers import regions_of
from turbo_hf.graphs.step_runner import StepRunner

PLAIN = flat_config(block_size=32, compile=False)
AUTO = replace(PLAIN, compile="auto")


@pytest.fixture(autouse=True)
def quick(
    monkeypatch: pytest.MonkeyPatch, runners: list[StepRunner], tmp_path: Path
) -> Iterator[list["subprocess.Popen[str]"]]:
    """Few steps, no inductor here, a stand-in for the process; returns the processes that were begun."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*args: Any, **kwargs: Any) -> Any:
        begun.append(subprocess.Popen(*args, **kwargs))
        return begun[-1]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "subprocess", replace_popen(begin))
    monkeypatch.setattr(ahead, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(ahead, "PROGRAM", "ahead_stub")
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr(compiled_layers, "EVERY", 4)
    monkeypatch.setattr(compiled_layers, "AFTER", 12)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield begun
    torch._dynamo.reset()
    assert all(process.poll() is not None for process in begun)


def replace_popen(begin: Callable[..., Any]) -> Any:
    """The module `subprocess` with another Popen."""

    class Module:
        PIPE, DEVNULL, Popen = subprocess.PIPE, subprocess.DEVNULL, staticmethod(begin)

    return Module


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def on(device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) for name, x in ragged([40]).items()}


def job(model: Any, rows: int = 1) -> dict[str, Any]:
    return job_of(model, [region.layer for region in regions_of(model)], rows)


def test_steps_take_over_when_it_pays(
    quick: list["subprocess.Popen[str]"],
    runners: list[StepRunner],
    capfd: pytest.CaptureFixture[str],
    device: torch.device,
) -> None:
    model, given = tiny_llama().to(device), on(device)
    want = answer(model, PLAIN, **given, max_new_tokens=40)
    with warnings.catch_warnings(), turbo_hf.patch(model, AUTO) as handle:
        warnings.simplefilter("error")

        def generates(tokens: int) -> str:
            got = model.generate(**given, max_new_tokens=tokens, do_sample=False)
            assert torch.equal(got, want[:, : 40 + tokens])
            return handle.report().steps

        # short calls: nothing is begun, and nothing compiled
        assert "layers compiled after 12 of one batch size" in generates(5)
        assert not quick
        assert "being compiled in a process of its own" in generates(8)
        assert len(quick) == 1
        quick[0].wait()
        assert not compilations()
        # in the midst of a call
        assert "; layers compiled (" in generates(40)
        assert compilations() == 1
        # one without compiled layers, one with them
        assert runners[-1].captures == 2
        assert "; layers compiled (" in generates(5)
        # on a GPU the runner of the call before replays what it has captured
        assert runners[-1].captures == (2 if device.type == "cuda" else 1)
    # a later patch finds the mark
    with turbo_hf.patch(model, AUTO) as handle:
        assert "; layers compiled (" in generates(40)
    assert len(quick) == 1
    told = capfd.readouterr()
    assert not told.err
    assert not told.out


def test_batch_sizes_are_counted_apart(quick: list["subprocess.Popen[str]"]) -> None:
    model = tiny_llama(num_hidden_layers=1)
    with turbo_hf.patch(model, AUTO):
        for rows in (1, 2, 3):
            model.generate(**ragged([9] * rows), max_new_tokens=5, do_sample=False)
        assert not quick
        model.generate(**ragged([9, 9, 9]), max_new_tokens=8, do_sample=False)
        assert len(quick) == 1
        # one process at a time
        model.generate(**ragged([9]), max_new_tokens=30, do_sample=False)
        assert len(quick) == 1
    assert not compilations()


def test_what_fails_is_tried_once_and_reported(
    quick: list["subprocess.Popen[str]"], capfd: pytest.CaptureFixture[str]
) -> None:
    model, given = tiny_llama(num_hidden_layers=1), ragged([40, 9])
    want = answer(model, PLAIN, **given)
    with warnings.catch_warnings(), turbo_hf.patch(model, AUTO) as handle:
        warnings.simplefilter("error")
        model.generate(**given, max_new_tokens=8, do_sample=False)
        quick[0].wait()
        assert torch.equal(model.generate(**given, max_new_tokens=40, do_sample=False), want)
        assert "layers not compiled (compiled ahead, they failed: two are too many)" in handle.report().steps
    assert len(quick) == 1
    assert not capfd.readouterr().err


@pytest.mark.parametrize("how", ["remove", "forgotten", "exit"])
def test_no_process_outlives_its_patch(
    how: str, quick: list["subprocess.Popen[str]"], runners: list[StepRunner]
) -> None:
    model: Any = tiny_llama(num_hidden_layers=1)
    handle: Any = turbo_hf.patch(model, AUTO)
    model.generate(**ragged([9, 9, 9]), max_new_tokens=8, do_sample=False)
    assert quick[0].poll() is None
    if how == "remove":
        handle.remove()
    elif how == "exit":
        # as Python does at its end
        handle._compiled._ahead._end()
    else:
        del model, handle
        runners.clear()
        gc.collect()
    assert quick[0].poll() is not None


def test_a_process_ends_with_the_one_that_began_it() -> None:
    """Even with one that is killed: the end of a pipe tells."""
    program = (
        "import os, signal\n"
        "from turbo_hf.graphs import ahead\n"
        "ahead.DEVICES, ahead.PROGRAM = ('cpu',), 'ahead_sleeps'\n"
        "held = ahead.Ahead()\n"
        "held.done({'device': 'cpu', 'rows': 3})\n"
        "os.write(1, str(held.process.pid).encode())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert shown.returncode == -signal.SIGKILL, shown.stderr
    # gone, or as good as: nobody may be there to ask how it ended
    state, end = Path(f"/proc/{int(shown.stdout)}/stat"), time.monotonic() + 300
    while state.exists() and state.read_text().split(")")[-1].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)


def test_without_a_folder_or_caches_nothing_is_compiled(
    quick: list["subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_llama(num_hidden_layers=1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with turbo_hf.patch(model, AUTO) as handle:
        model.generate(prompts(1, 40), max_new_tokens=20, do_sample=False)
        assert "layers not compiled (no process can compile them ahead: [Errno 20]" in handle.report().steps
    with (
        inductor_config.patch(force_disable_caches=True),
        pytest.raises(Unsupported, match="torch's caches on disk are off"),
    ):
        Ahead().done(job(model))
    monkeypatch.undo()
    with pytest.raises(Unsupported, match="the model is on cpu"):
        Ahead().done(job(model))
    assert not quick


def test_a_job_describes_the_first_layer_of_each_kind() -> None:
    shape: dict[str, Any] = {**SHAPE, "num_hidden_layers": 4, "attn_implementation": None}
    config = AutoConfig.for_model("qwen2", **shape)
    model = AutoModelForCausalLM.from_config(config)
    assert job(model)["config"]["num_hidden_layers"] == 1
    assert len(job(model)["config"]["layer_types"]) == 1
    assert json.loads(json.dumps(job(model))) == job(model)
    assert mark_of(job(model)) != mark_of(job(model, 2))
    before = described(model.model.layers[2])
    model.model.layers[2].mlp.up_proj.requires_grad_(False)
    assert described(model.model.layers[2]) != before
    assert job(model)["config"]["num_hidden_layers"] == 3
    # its config does not tell of that
    with pytest.raises(Unsupported, match="its layers are not those of its config alone"):
        compile_ahead(job(model))


def test_what_was_compiled_ahead_is_loaded_from_disk(
    quick: list["subprocess.Popen[str]"],
    monkeypatch: pytest.MonkeyPatch,
    runners: list[StepRunner],
    device: torch.device,
) -> None:
    """By inductor, in a process of its own; here nothing is compiled but what is found on disk."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    monkeypatch.setattr(ahead, "PROGRAM", "turbo_hf.graphs.compile_ahead")
    # what a CPU can do is tried out for ten seconds in each process
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    model, given = tiny_llama().to(device), on(device)
    want = answer(model, PLAIN, **given, max_new_tokens=40)
    with inductor_config.patch({"cpp.vec_isa_ok": False}), turbo_hf.patch(model, AUTO) as handle:
        model.generate(**given, max_new_tokens=8, do_sample=False)
        assert quick, handle.report().steps
        quick[0].wait()
        got = model.generate(**given, max_new_tokens=40, do_sample=False)
        assert "; layers compiled (" in handle.report().steps
    # sums are in another order, and a tie may fall otherwise
    assert (got == want).float().mean() > 0.9
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["fxgraph_cache_hit"] == 1, counters["inductor"]
    assert not counters["inductor"]["fxgraph_cache_miss"]
    assert compilations() == 1
