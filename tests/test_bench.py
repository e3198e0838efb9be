"""`turbo-hf bench` at toy size on the CPU: the checks before the clock, the figures, the files, the refusals."""

import json
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import CPU, check_refused, complaint, last_json, run
from models import LAB_MODEL, lab_model, prompts, tiny_llama, tiny_mistral
from support import attend as dense
from support import check, float_budget, largest, tokens

from turbo_hf.eval.bench.capture import capture, token_ids
from turbo_hf.eval.bench.check import Sample, verify
from turbo_hf.eval.bench.error import DISTRIBUTIONS, FP8_TENSOR, METHODS, random_errors
from turbo_hf.eval.bench.options import as_json
from turbo_hf.eval.bench.oracle import attend, errors, to_e4m3
from turbo_hf.eval.bench.prefill import inputs
from turbo_hf.eval.bench.shapes import SHAPES, SIZES, Case, parse_size, parse_tokens, tokens_label
from turbo_hf.eval.bench.timing import Call, Ceilings, Stopwatch, side_by_side, speedup, spread
from turbo_hf.layout import AttentionOutput
from turbo_hf.ops import prefill as op

TOY = ["--device", "cpu", "--shape", "qwen2.5-0.5b", "--size", "1x70", "--seconds", "0"]


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_the_published_sizes() -> None:
    sizes = [(16, 1024), (4, 4096), (4, 16384), (1, 32768), (1, 131072)]
    assert [parse_size(text) for text in SIZES] == sizes
    assert [f"{batch}x{tokens_label(n)}" for batch, n in sizes] == list(SIZES)
    assert parse_tokens("128k") == parse_tokens("131072") == 131072
    for n in (1, 63, 1000, 3072, 134144, 65536):
        assert parse_tokens(tokens_label(n)) == n


@pytest.mark.parametrize("text", ["", "16", "x1k", "0x1k", "4x", "4x0", "4x1m", "4x-1", "ax1k"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a (size like 16x1k|number of tokens like 4096 or 4k)"):
        parse_size(text)


def test_work_is_counted_as_the_papers_count_it() -> None:
    full = Case("llama3-8b", SHAPES["llama3-8b"], 4, 16384, False)
    causal = Case("llama3-8b", SHAPES["llama3-8b"], 4, 16384, True)
    assert full.flops == 2 * causal.flops == 4 * 4 * 32 * 16384**2 * 128
    # q and o of 32 heads, k and v of 8
    assert full.bytes_moved(2) == 2 * 4 * 16384 * 128 * (32 + 32 + 8 + 8)
    assert str(causal) == "4x16k causal"


# --- time -----------------------------------------------------------------------------------------------------------


def test_every_call_runs_in_every_round_and_none_always_first() -> None:
    order: list[str] = []
    calls: dict[str, Call] = {name: partial(order.append, name) for name in "abc"}
    times = side_by_side(calls, Stopwatch(CPU), seconds=0)
    (rounds,) = {len(own) for own in times.values()}
    timed = order[-3 * rounds :]
    assert [sorted(timed[i : i + 3]) for i in range(0, len(timed), 3)] == [["a", "b", "c"]] * rounds
    assert set(timed[::3]) == {"a", "b", "c"}


def test_ratios_are_taken_round_by_round() -> None:
    ours, theirs = [1.0, 10.0, 1.0], [2.0, 20.0, 6.0]
    assert speedup(ours, theirs) == 2.0
    assert statistics.median(theirs) / statistics.median(ours) != 2.0
    assert spread([3.0] * 5) == 0


def test_the_floor_is_the_longer_of_work_and_bytes() -> None:
    limits = Ceilings(8192, bf16=500.0, int8=800.0, fp8=1000.0, copy=4.0)
    assert limits.floor_ms(2e15, (8, 8), 0) == pytest.approx(2e15 / 1000e12 * 1e3)
    assert limits.floor_ms(2e15, (8, 16), 0) == pytest.approx((1e15 / 1000e12 + 1e15 / 500e12) * 1e3)
    assert limits.floor_ms(1.0, (16, 16), 4e12) == pytest.approx(1e3)
    assert Ceilings(8192, 500.0, None, None, 4.0).eight_bit == 500.0


# --- the oracle, against the one of the tests -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"causal": True}, id="causal"),
        pytest.param({"causal": False}, id="full"),
        pytest.param({"causal": True, "window": 9, "softcap": 3.0, "sinks": torch.ones(4)}, id="all"),
    ],
)
def test_the_oracle_is_the_tests_own(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.eval.bench.oracle.TILE_SCORES", 4 * 63 * 10)
    q, k, v = tokens(4, 63, 16), tokens(2, 63, 16), tokens(2, 63, 16)
    places = torch.tensor([0, 5, 40, 62])
    got = attend(q[:, places], k, v, scaling=0.2, places=places, **options)
    out, lse, _ = dense(q, k, v, scaling=0.2, **options)
    # both sum in float64, in another order
    flipped, flipped_lse, _ = dense(q.flip(-1), k.flip(-1), v, scaling=0.2, **options)
    check("out", got.out, out[:, places], float_budget(out, flipped, largest(v), torch.float64))
    check("lse", got.lse, lse[:, places], float_budget(lse, flipped_lse, largest(lse), torch.float64))


def test_the_three_errors() -> None:
    want = torch.tensor([1.0, -2.0, 4.0, 0.0], dtype=torch.float64)
    norm, mre, elementwise = errors(torch.tensor([1.5, -2.0, 3.0, 0.0]), want)
    assert norm == pytest.approx((1.25 / 21) ** 0.5)
    assert mre == pytest.approx(1.5 / 7)
    assert elementwise == pytest.approx((0.5 + 0.25) / 3)


def test_e4m3_keeps_the_largest_value_and_three_bits() -> None:
    x = tokens(4, 100, 64).double()
    rounded = to_e4m3(x)
    assert largest(rounded) == pytest.approx(largest(x), rel=1e-6)
    normal = x.abs() > largest(x) / 448 * 2**-6
    # three bits after the point, half of the last one, and the float32 scale
    off = ((rounded - x).abs() / x.abs())[normal].max()
    assert off <= 2**-4 * (1 + torch.finfo(torch.float32).eps * 4)
    assert not to_e4m3(torch.zeros(3)).any()


# --- bench prefill --------------------------------------------------------------------------------------------------


def test_prefill_prints_tables_json_and_files(tmp_path: Path) -> None:
    modes = [word for mode in ("turbo", "int8", "half", "fp8", "fp16") for word in ("--mode", mode)]
    result = run("prefill", *TOY, *modes, "--out", str(tmp_path / "new"), "--json")
    report = last_json(result)
    assert report == json.loads((tmp_path / "new" / "prefill.json").read_text())
    assert (tmp_path / "new" / "prefill.png").read_bytes().startswith(b"\x89PNG")
    assert report["options"]["seed"] == 0
    assert report["facts"]["versions"]["torch"]
    assert report["ceilings"]["copy"] > 0
    rows = {(row["method"], row["causal"]): row for row in report["rows"]}
    assert set(rows) == {(m, c) for m in ("SDPA math", "turbo", "int8", "half", "fp8", "fp16") for c in (True, False)}
    for (method, causal), row in rows.items():
        flops = Case("", SHAPES["qwen2.5-0.5b"], 1, 70, causal).flops
        assert row["tflops"] == pytest.approx(flops / 1e9 / row["ms"])
        assert row["roofline"] == pytest.approx(row["floor_ms"] / row["ms"])
        assert row["rounds"] >= 5
        assert (row["quantize_ms"] is not None) == (method in ("turbo", "int8", "half", "fp8"))
        if row["ours"]:
            assert row["check"]["worst"] <= row["check"]["budget"]
            assert set(row["speedup"]) == {"SDPA math"}
    assert "On a CPU" in result.stdout


def broken(how: str) -> Any:
    """`ops.prefill` with one thing wrong."""
    right = op.prefill

    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> AttentionOutput:
        if how == "mask":
            options["causal"] = False
        if how == "scale":
            options["scaling"] *= 1.2
        if how == "raises":
            raise RuntimeError("out of registers")
        if how == "refuses":
            raise ValueError('mode "turbo" needs another GPU.')
        out, lse = right(q, k, v, **options)
        if how == "row":
            out[0, -1, -1] = out[0, -1, -2]
        if how == "unwritten":
            out[0, 3, 20:30] = torch.empty_like(out[0, 3, 20:30])
        if how == "lse":
            lse = lse / 0.6931
        return AttentionOutput(out, lse)

    return prefill


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mask", "wrong: a query is off by"),
        ("scale", "wrong: a query is off by"),
        ("row", "wrong: a query is off by"),
        ("unwritten", "wrong: the result has elements that are NaN or infinite, or that nothing wrote"),
        ("lse", "wrong: an lse is off by"),
        ("raises", "failed: RuntimeError: out of registers"),
        ("refuses", 'refused: mode "turbo" needs another GPU.'),
    ],
)
def test_what_is_wrong_is_not_timed(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "prefill", broken(how))
    result = run("prefill", *TOY, "--causal", "--mode", "turbo", "--json", code=1)
    baseline, turbo = last_json(result)["rows"]
    assert turbo["ms"] is None
    assert message in turbo["note"]
    assert message in complaint(result)
    # the others keep their figures
    assert baseline["ms"] > 0


@pytest.mark.parametrize("mode", [method.options["mode"] for method in METHODS[:3]])
def test_the_budget_is_what_the_mode_costs_and_little_more(mode: str) -> None:
    """A result right in itself passes, and would not if its error were three times as large."""
    case = Case("", SHAPES["qwen2.5-0.5b"], 2, 150, True)
    q, k, v = inputs(case, torch.float16, CPU, 0)
    options: dict[str, Any] = {"scaling": 0.125, "causal": True, "mode": mode}
    sample = Sample(q, k, v, scaling=0.125, causal=True, seed=0)
    got = op.prefill(q, k, v, **options)
    passed = verify(got, sample, options)
    assert not passed.problem
    exact = torch.stack([attend(q[b], k[b], v[b], scaling=0.125, causal=True).out for b in range(2)])
    worse = exact + (passed.budget / passed.worst) * 1.5 * (got.out - exact)
    assert "a query is off by" in verify(AttentionOutput(worse, got.lse), sample, options).problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prefill", "--shape", "llama9"], "unknown shape llama9; shapes are llama3-8b, phi3-medium, qwen2.5-0.5b."),
        (["prefill", "--mode", "int4"], "unknown mode int4; choose from turbo, int8, half, fp8, fp16."),
        (["prefill", "--size", "1k"], "expected a size like 16x1k (rows x tokens); got '1k'."),
        (["prefill", "--backend", "cuda"], "unknown backend cuda; choose from auto, triton, reference."),
        (["prefill", "--dtype", "float32"], "unknown dtype float32; choose from float16, bfloat16."),
        (["prefill", "--v-scale", "row"], "unknown v-scale row; choose from block, channel, tensor."),
        (["prefill", "--device", "nowhere"], "no device 'nowhere'"),
        (["error", "--mode", "int4"], "unknown mode int4; choose from turbo, int8, half, fp8, fp16."),
        (["error", "--length", "many"], "expected a number of tokens like 4096 or 4k; got 'many'."),
        (["error", "--text", "x.txt"], "--text needs --model."),
        (["error", "--model", str(LAB_MODEL), "--text", "no.txt"], "there is no file no.txt."),
        (["error", "--model", "no/such-folder", "--device", "cpu"], "cannot load 'no/such-folder'"),
    ],
    ids=lambda words: words[-1] if isinstance(words, list) else "",
)
def test_mistakes_get_one_sentence_and_exit_1(words: list[str], message: str) -> None:
    check_refused(message, *words)


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("prefill", *TOY, "--out", str(tmp_path), code=1)
    assert 'pip install "turbo_hf[bench]"' in complaint(result)


def test_json_has_no_nan() -> None:
    assert json.loads(as_json({"a": [float("nan"), 1.5, {"b": float("inf")}]})) == {"a": [None, 1.5, {"b": None}]}


# --- bench error ----------------------------------------------------------------------------------------------------


def norms(distribution: str, n: int, seed: int, **options: Any) -> dict[str, float]:
    """Norm errors of every method on 2 heads of 64 channels."""
    rows = random_errors(
        distribution,
        n,
        list(METHODS),
        heads=2,
        dim=64,
        causal=False,
        dtype=torch.float32,
        device=CPU,
        seed=seed,
        options={"block": 32, **options},
    )
    return {row.method: row.norm for row in rows}


@pytest.mark.parametrize("distribution", list(DISTRIBUTIONS))
def test_modes_rank_by_what_they_round(distribution: str) -> None:
    found = norms(distribution, 192, 0)
    full = [found[name] for name in found if name.startswith(("turbo", "int8"))]
    # rounding V and P too costs more than rounding Q and K; three bits of mantissa cost more than seven bits
    assert found["fp16"] < found["half"] < min(full)
    assert max(full) < found[FP8_TENSOR]
    assert max(full) < found["fp8"] or distribution == "N(0,1)"
    assert found["half"] < found["fp8"]


def growth(short: list[float], long: list[float]) -> float:
    """By how many of its standard errors the mean of `long` exceeds that of `short`."""
    chance = math.sqrt(statistics.variance(short) / len(short) + statistics.variance(long) / len(long))
    return (statistics.mean(long) - statistics.mean(short)) / chance


@pytest.mark.parametrize("distribution", list(DISTRIBUTIONS))
def test_full_int8_with_scales_by_block_does_not_grow_with_length(distribution: str) -> None:
    """Scales by channel or tensor cover a range that grows with the number of tokens; blocks do not."""
    short, long = ([norms(distribution, n, seed) for seed in range(5)] for n in (192, 768))
    for method in ("turbo", "int8, V block"):
        assert growth([run[method] for run in short], [run[method] for run in long]) < 3


def test_p_in_steps_of_the_row_maximum_grows_with_length() -> None:
    """INT-FlashAttention's own P, for which the test above would fail."""

    def norm(n: int) -> float:
        q, k, v = torch.randn(3, 2, n, 64).unbind()
        how: dict[str, Any] = {"scaling": 0.125, "causal": False}
        rounded = attend(q, k, v, round_p=lambda p: (127 * p).round() / 127, **how)
        return errors(rounded.out, attend(q, k, v, **how).out).norm

    assert growth([norm(192) for _ in range(5)], [norm(768) for _ in range(5)]) > 3


def test_error_prints_tables_and_json(tmp_path: Path) -> None:
    words = ["--length", "64", "--length", "96", "--dim", "64", "--heads", "2", "--mode", "int8", "--causal"]
    result = run("error", "--device", "cpu", *words, "--out", str(tmp_path), "--json")
    report = last_json(result)
    assert report == json.loads((tmp_path / "error.json").read_text())
    methods = {"int8, V tensor", "int8, V block", "int8, V channel", FP8_TENSOR}
    assert {(row["source"], row["tokens"], row["method"]) for row in report["rows"]} == {
        (source, n, method) for source in DISTRIBUTIONS for n in (64, 96) for method in methods
    }
    assert all(0 < row["norm"] < 1 and 0 < row["mre"] < 1 for row in report["rows"])
    assert "N(0,1), d = 64, causal: norm, %" in result.stdout
    assert [line for line in result.stderr.splitlines() if line.endswith("done")] == [
        f"{source}, {n} tokens: done" for source in DISTRIBUTIONS for n in (64, 96)
    ]


def test_errors_of_a_trained_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The mass of men lead lives of quiet desperation.")
    words = ["--model", str(LAB_MODEL), "--text", str(text), "--length", "80", "--mode", "fp16", "--mode", "turbo"]
    report = last_json(run("error", "--device", "cpu", *words, "--json"))
    rows = report["rows"]
    assert [row["source"] for row in rows[::3]] == [*(f"layer {i}" for i in range(6)), "mean"]
    turbo = [row["norm"] for row in rows if row["method"] == "turbo"]
    assert turbo[-1] == pytest.approx(statistics.mean(turbo[:-1]))
    for fp16, mode, fp8 in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert fp16["norm"] < mode["norm"] < fp8["norm"]


def test_a_prompt_too_long_for_the_model_is_refused() -> None:
    result = run("error", "--device", "cpu", "--model", str(LAB_MODEL), "--length", "1000k", code=1)
    assert "the model was made for" in complaint(result)


# --- capture --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 20])
def test_capture_is_what_attention_is_given(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention of what was captured is what the model's own attention returned, and the model is left alone."""
    model = tiny_llama() if window is None else tiny_mistral(window)
    ids = prompts(1, 50)
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for layer in model.model.layers
    ]
    before = model(ids, use_cache=False).logits
    own = seen.copy()
    layers = capture(model, ids)
    assert [layer.index for layer in layers] == [0, 1]
    for layer, want in zip(layers, own, strict=True):
        assert layer.about["window"] == window
        got = attend(layer.q[0], layer.k[0], layer.v[0], causal=True, **layer.about).out
        exact = got.transpose(0, 1).flatten(1)
        eager = want[0].double()
        assert (eager - exact).norm() <= 3 * 50 * torch.finfo(torch.float32).eps * exact.norm()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids, use_cache=False).logits, before)
    for hook in hooks:
        hook.remove()


def test_a_short_text_is_read_again(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    ids = token_ids(tokenizer, None, 300)
    assert ids.shape == (1, 300)
    path = tmp_path / "short.txt"
    path.write_text("one two three")
    (again,) = token_ids(tokenizer, path, 50).tolist()
    once = tokenizer("one two three").input_ids
    assert again == (once * 50)[:50]
    path.write_text("")
    if not tokenizer("").input_ids:
        with pytest.raises(ValueError, match="has no text"):
            token_ids(tokenizer, path, 50)


def test_first_token_of_a_tiny_model() -> None:
    words = ["first-token", "--tiny", "--layers", "2", "--length", "100", "--seconds", "0", "--device", "cpu"]
    rows = last_json(run(*words, "--mode", "auto", "--mode", "fp16", "--json"))["rows"]
    assert [row["method"] for row in rows] == ["SDPA", "auto", "fp16"]
    assert all(row["ms"] > 0 for row in rows)


def test_first_token_refuses_an_unknown_mode() -> None:
    check_refused("unknown mode fast", "first-token", "--tiny", "--mode", "fast", "--device", "cpu")


@pytest.mark.parametrize(
    "words", [["prefill"], ["decode"], ["sparse"], ["generate"], ["first-token", "--length", "1k"]]
)
def test_a_cpu_does_not_run_what_is_sized_for_a_gpu(words: list[str]) -> None:
    check_refused("the defaults are sized for a GPU, and this is a CPU. Choose", *words, "--device", "cpu")
