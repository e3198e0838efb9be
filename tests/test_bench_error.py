"""`turbo-hf bench error` at toy size: how modes rank, how errors grow with length, what it captures of a model."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import CPU, complaint, last_json, run
from models import LAB_MODEL, lab_model, prompts, tiny_llama, tiny_mistral

from turbo_hf.eval.bench.captured_layers import capture, token_ids
from turbo_hf.eval.bench.error import DISTRIBUTIONS, FP8_TENSOR, METHODS, random_errors
from turbo_hf.eval.bench.oracle import attend, errors


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


@pytest.mark.parametrize("window", [None, 20])
def test_capture_is_what_attention_is_given(window: int | None) -> None:
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
