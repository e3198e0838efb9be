"""`turbo-hf bench generate` on tiny models on the CPU: figures, files, memory that runs out, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import check_refused, last_json, run
from models import LAB_MODEL

from turbo_hf import TurboConfig
from turbo_hf.eval.bench import clock, generate
from turbo_hf.eval.bench.clock import attempt
from turbo_hf.eval.bench.generate import GenerateMethod, Work, compare
from turbo_hf.eval.bench.random_models import KINDS, random_model

PLAIN: Any = {"mode": "native", "backend": "reference"}
TINY = ["bench", "generate", "--device", "cpu", "--tiny", "--rounds", "1", "--new", "3"]


@pytest.mark.parametrize(
    ("shape", "billions"), [("llama3-8b", 8.03), ("qwen2.5-0.5b", 0.494), ("deepseek-v2-lite", 15.7)]
)
def test_models_are_of_the_published_size(shape: str, billions: float) -> None:
    model = random_model(shape, None, torch.device("meta"))
    assert sum(x.numel() for x in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)
    # from transformers 5.24 on, the gates of experts stay in float32
    assert {x.dtype for name, x in model.named_parameters() if "gate" not in name} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"


def test_generate_of_tiny_models(tmp_path: Path) -> None:
    shapes = [word for shape in KINDS for word in ("--shape", shape)]
    words = [*TINY, *shapes, "--context", "70", "--batch", "2", "--preset", "turbo4", "--preset", "int8"]
    words += ["--decoding", "greedy"]
    report = last_json(run(*words, "--out", str(tmp_path / "new"), "--json"))
    assert report == json.loads((tmp_path / "new" / "generate.json").read_text())
    assert {row["shape"] for row in report["rows"]} == set(KINDS)
    for row in report["rows"]:
        assert (row["batch"], row["context"], row["new"]) == (2, 70, 3)
        if row["method"] in ("SDPA", "turbo4", "int8"):
            whole_ms = 1e3 * 2 * 3 / row["tokens_s"]
            assert row["first_ms"] + 2 * row["step_ms"] <= whole_ms
            assert (row["speedup"] == 1) == (row["method"] == "SDPA")
            assert row["peak_bytes"] is None
            assert row["error"] < 0.2
            assert row["best"]["tokens_s"] <= row["speedup"]
        if row["method"] == "static":
            assert row["note"] == "generate compiles for a static cache on a GPU only"


def test_every_way_to_decode_is_compared_with_itself() -> None:
    # longer than what repeats itself: prompt lookup finds tokens to draft
    report = last_json(run(*TINY, "--context", "100", "--json"))
    figures = {row["method"]: row for row in report["rows"] if row["tokens_s"]}
    ways = ("", ", 4 beams", ", prompt lookup")
    assert {f"{name}{way}" for name in ("SDPA", "turbo4") for way in ways} <= set(figures)
    for way in ways[1:]:
        own, theirs = figures[f"turbo4{way}"], figures[f"SDPA{way}"]
        assert own["speedup"] == own["best"]["tokens_s"] == own["tokens_s"] / theirs["tokens_s"]
        assert theirs["best"] == {"tokens_s": 1.0, "first_ms": 1.0, "step_ms": 1.0}
        assert own["error"] < 0.2
    two = last_json(run(*TINY, "--context", "40", "--batch", "2", "--decoding", "prompt-lookup", "--json"))["rows"]
    assert {row["note"] for row in two} == {"prompt-lookup decoding takes one prompt at a time, in one pass"}


def test_the_first_token_alone_by_mode_of_attention() -> None:
    words = [*TINY[:-2], "--new", "1", "--context", "100", "--mode", "auto", "--mode", "native", "--decoding", "greedy"]
    rows = [row for row in last_json(run(*words, "--rounds", "3", "--json"))["rows"] if row["tokens_s"]]
    assert [row["method"] for row in rows[:3]] == ["SDPA", "turbo4/auto", "turbo4/native"]
    assert all(row["first_ms"] > 0 and row["first_spread"] >= 0 and row["step_ms"] is None for row in rows)


def test_a_model_of_ones_own() -> None:
    words = [*TINY[:4], "--model", str(LAB_MODEL), "--context", "100", *TINY[5:]]
    words += ["--decoding", "greedy", "--decoding", "beams"]
    rows = [row for row in last_json(run(*words, "--json"))["rows"] if row["tokens_s"]]
    assert {row["shape"] for row in rows} == {"lab-llama-4m"}
    assert {"SDPA", "turbo4", "turbo4, 4 beams"} <= {row["method"] for row in rows}
    assert all(row["error"] < 0.2 for row in rows)
    check_refused("leave out --shape, --layers and --tiny.", *words, "--layers", "1")


def test_logits_that_are_not_the_model_s_get_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = clock.Clock.__call__

    def wrong(self: Any, input_ids: Any, scores: Any) -> Any:
        return right(self, input_ids, scores.flip(-1))

    monkeypatch.setattr(clock.Clock, "__call__", wrong)
    result = run(*TINY, "--context", "20", "--decoding", "greedy", "--json", code=1)
    assert "SDPA on llama3-8b, 20 tokens: failed: its logits are off by" in " ".join(result.stderr.split())
    assert not any(row["tokens_s"] for row in last_json(result)["rows"])


def test_memory_that_runs_out_is_no_error_and_all_else_is() -> None:
    def fail(error: Exception) -> None:
        raise error

    assert attempt(lambda: 5) == 5
    assert attempt(partial(fail, torch.OutOfMemoryError("CUDA out of memory."))) is None
    assert attempt(partial(fail, RuntimeError("Triton Error [CUDA]: out of memory"))) is None
    with pytest.raises(RuntimeError, match="illegal"):
        attempt(partial(fail, RuntimeError("an illegal memory access")))


def test_a_batch_that_does_not_fit_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(generate, "_generate", full)
    model, work = random_model("llama3-8b", 1, torch.device("cpu"), tiny=True), Work(20, 4, 1, None, 0)
    (row,) = compare(model, "llama3-8b", [GenerateMethod("SDPA")], work, 64)
    assert (row.batch, row.tokens_s, row.note) == (64, None, "does not fit the memory")


def test_a_patched_model_that_fails_is_named_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no such family")

    monkeypatch.setattr(generate, "patch", refuse)
    result = run(*TINY, "--context", "20", "--decoding", "greedy", "--json", code=1)
    base, _, ours = last_json(result)["rows"][:3]
    assert base["tokens_s"] > 0
    assert ours["note"] == "failed: ValueError: no such family"
    assert "turbo4 on llama3-8b, 20 tokens: failed" in " ".join(result.stderr.split())


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_are_on_unless_they_are_turned_off(graphs: bool) -> None:
    model = random_model("qwen2.5-0.5b", None, torch.device("cpu"), tiny=True)
    method = GenerateMethod("turbo4", config=TurboConfig(cuda_graphs=graphs))
    with generate._cache_of(model, method):
        assert ("get_compiled_call" in vars(model)) == graphs
    assert "get_compiled_call" not in vars(model)
