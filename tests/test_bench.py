"""`turbo-hf bench`: the shapes, the clock and the oracle that its commands share, what they refuse; `bench generate`
on tiny models."""

import itertools
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import check_refused, last_json, run
from models import LAB_MODEL
from stores import tokens

from turbo_hf import TurboConfig
from turbo_hf.eval.bench import generate, timing
from turbo_hf.eval.bench.generate import GenerateMethod, Work, compare
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.random_models import KINDS, random_model
from turbo_hf.eval.bench.runner import as_json
from turbo_hf.eval.bench.shapes import SHAPES, SIZES, PromptCase, parse_size, parse_tokens, tokens_label
from turbo_hf.eval.bench.timing import Call, Stopwatch, side_by_side, speedup, spread


def test_the_published_sizes() -> None:
    sizes = [(16, 1024), (4, 4096), (4, 16384), (1, 32768), (1, 131072)]
    assert [parse_size(text) for text in SIZES] == sizes
    assert [f"{batch}x{tokens_label(n)}" for batch, n in sizes] == list(SIZES)
    assert parse_tokens("128k") == parse_tokens("131072") == 131072
    assert (parse_tokens("1M"), tokens_label(1 << 20), tokens_label(1 << 19)) == (1 << 20, "1M", "524k")
    for n in (1, 63, 1000, 3072, 134144, 65536):
        assert parse_tokens(tokens_label(n)) == n


@pytest.mark.parametrize("text", ["", "16", "x1k", "0x1k", "4x", "4x0", "4x1m", "4x-1", "ax1k"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a (size like 16x1k|number of tokens like 4096 or 4k)"):
        parse_size(text)


def test_work_is_counted_as_the_papers_count_it() -> None:
    case = PromptCase("llama3-8b", SHAPES["llama3-8b"], 4, 16384)
    assert case.flops == 2 * 4 * 32 * 16384**2 * 128
    assert str(case) == "4x16k causal"


def test_every_call_runs_in_every_round_and_none_always_first() -> None:
    order: list[str] = []
    calls: dict[str, Call] = {name: partial(order.append, name) for name in "abc"}
    times = side_by_side(calls, Stopwatch(torch.device("cpu")), seconds=0)
    (rounds,) = {len(own) for own in times.values()}
    timed = order[-3 * rounds :]
    assert [sorted(timed[i : i + 3]) for i in range(0, len(timed), 3)] == [["a", "b", "c"]] * rounds
    assert set(timed[::3]) == {"a", "b", "c"}


def test_ratios_are_taken_round_by_round() -> None:
    ours, theirs = [1.0, 10.0, 1.0], [2.0, 20.0, 6.0]
    assert speedup(ours, theirs) == 2.0
    assert statistics.median(theirs) / statistics.median(ours) != 2.0
    assert spread([3.0] * 5) == 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"causal": True}, id="causal"),
        pytest.param({"causal": False}, id="full"),
        pytest.param({"causal": True, "window": 9, "softcap": 3.0, "sinks": torch.ones(4)}, id="all"),
    ],
)
def test_the_oracle_is_a_loop_over_keys(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.eval.bench.oracle.TILE_SCORES", 4 * 63 * 10)
    q, k, v = tokens(4, 63, 16), tokens(2, 63, 16), tokens(2, 63, 16)
    places = torch.tensor([0, 5, 40, 62])
    got = attend(q[:, places], k, v, scaling=0.2, places=places, **options)
    window, cap, sinks = (options.get(name) for name in ("window", "softcap", "sinks"))
    for head, (at, place) in itertools.product(range(4), enumerate(places.tolist())):
        out, total = torch.zeros(16, dtype=torch.float64), math.exp(sinks[head]) if sinks is not None else 0.0
        for key in range(63):
            if (options["causal"] and key > place) or (window is not None and key <= place - window):
                continue
            score = 0.2 * math.fsum((q[head, place].double() * k[head // 2, key].double()).tolist())
            weight = math.exp(score if cap is None else cap * math.tanh(score / cap))
            out, total = out + weight * v[head // 2, key].double(), total + weight
        # both sum in float64, in another order
        torch.testing.assert_close(got.out[head, at], out / total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(float(got.lse[head, at]), math.log(total), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prefill --shape llama9", "unknown shape llama9; shapes are llama3-8b, phi3-medium, qwen2.5-0.5b."),
        ("prefill --mode int4", "unknown mode int4; choose from turbo, int8, half, fp8, native."),
        ("prefill --size 1k", "expected a size like 16x1k (rows x tokens); got '1k'."),
        ("prefill --backend cuda", "unknown backend cuda; choose from auto, triton, reference."),
        ("decode --shape llama9", "unknown shape llama9; shapes are llama3-8b, phi3-medium, qwen2.5-0.5b, qwen"),
        ("generate --mode fast", "unknown mode fast; choose from auto, turbo, int8, half, fp8, native."),
        ("prefill --device nowhere", "no device 'nowhere'"),
        ("decode --width 5", "unknown width 5; choose from 16, 8, 4, 3, 2, mixed, k4v3, k4v2."),
        ("decode --shape lean-16 --ragged", "no default case of lean-16 is ragged; give --size."),
        ("decode --selector mean", "unknown selector mean; choose from saap, kmeans, kmeans-rotated."),
        ("decode --share 0", "a share must be above 0 and at most 1; got [0.0]."),
        ("decode --share 0.1", "--share is of sparse steps: add --selector saap."),
        ("decode --selector saap --shape deepseek-v2-lite", "steps over latents are not sparse: leave o"),
        (
            "generate --shape phi",
            "unknown shape phi; choose from llama3-8b, qwen2.5-0.5b, qwen2.5-1.5b, gemma3-270m, d",
        ),
        ("generate --context long", "expected a number of tokens like 4096 or 4k; got 'long'."),
        ("generate --preset turbo9", "turbo9"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_1(words: str, message: str) -> None:
    check_refused(message, "bench", *words.split())


def test_json_has_no_nan() -> None:
    assert json.loads(as_json({"a": [float("nan"), 1.5, {"b": float("inf")}]})) == {"a": [None, 1.5, {"b": None}]}


@pytest.mark.parametrize("words", [["prefill"], ["decode"], ["decode", "--selector", "saap"], ["generate"]])
def test_a_cpu_does_not_run_what_is_sized_for_a_gpu(words: list[str]) -> None:
    check_refused("the defaults are sized for a GPU, and this is a CPU. Choose", "bench", *words, "--device", "cpu")


# --- bench generate --------------------------------------------------------------------------------------------------


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


def test_the_first_token_alone_by_mode_of_attention() -> None:
    words = [*TINY[:-2], "--new", "1", "--context", "100", "--mode", "auto", "--mode", "native"]
    rows = [row for row in last_json(run(*words, "--rounds", "3", "--json"))["rows"] if row["tokens_s"]]
    assert [row["method"] for row in rows[:3]] == ["SDPA", "turbo4/auto", "turbo4/native"]
    assert all(row["first_ms"] > 0 and row["first_spread"] >= 0 and row["step_ms"] is None for row in rows)


def test_a_model_of_ones_own() -> None:
    words = [*TINY[:4], "--model", str(LAB_MODEL), "--context", "100", *TINY[5:]]
    rows = [row for row in last_json(run(*words, "--json"))["rows"] if row["tokens_s"]]
    assert {row["shape"] for row in rows} == {"lab-llama-4m"}
    assert {"SDPA", "turbo4"} <= {row["method"] for row in rows}
    assert all(row["error"] < 0.2 for row in rows)
    check_refused("leave out --shape, --layers and --tiny.", *words, "--layers", "1")


def test_logits_that_are_not_the_model_s_get_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = timing.Clock.__call__

    def wrong(self: Any, input_ids: Any, scores: Any) -> Any:
        return right(self, input_ids, scores.flip(-1))

    monkeypatch.setattr(timing.Clock, "__call__", wrong)
    result = run(*TINY, "--context", "20", "--json", code=1)
    assert "SDPA on llama3-8b, 20 tokens: failed: its logits are off by" in " ".join(result.stderr.split())
    assert not any(row["tokens_s"] for row in last_json(result)["rows"])


def test_memory_that_runs_out_is_no_error_and_all_else_is() -> None:
    def fail(error: Exception) -> None:
        raise error

    assert timing.attempt(lambda: 5) == 5
    assert timing.attempt(partial(fail, torch.OutOfMemoryError("CUDA out of memory."))) is None
    assert timing.attempt(partial(fail, RuntimeError("Triton Error [CUDA]: out of memory"))) is None
    with pytest.raises(RuntimeError, match="illegal"):
        timing.attempt(partial(fail, RuntimeError("an illegal memory access")))


def test_a_batch_that_does_not_fit_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(generate, "_generate", full)
    model, work = random_model("llama3-8b", 1, torch.device("cpu"), tiny=True), Work(20, 4, 1, 0)
    (row,) = compare(model, "llama3-8b", [GenerateMethod("SDPA")], work, 64)
    assert (row.batch, row.tokens_s, row.note) == (64, None, "does not fit the memory")


def test_a_patched_model_that_fails_is_named_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no such family")

    monkeypatch.setattr(generate, "patch", refuse)
    result = run(*TINY, "--context", "20", "--json", code=1)
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
