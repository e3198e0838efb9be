"""`turbo-hf bench prefill` at toy size: what is wrong is not timed, the rest has figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import CPU, check_not_timed, last_json, run

from turbo_hf.eval.bench.checked import Sample, verify
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.prefill import inputs
from turbo_hf.eval.bench.shapes import SHAPES, PromptCase
from turbo_hf.layout import AttentionOutput, Rounding, Scoring
from turbo_hf.ops.prefill import contract as op

TOY = ["--device", "cpu", "--shape", "qwen2.5-0.5b", "--size", "1x70", "--seconds", "0"]


def test_prefill_prints_tables_json_and_files(tmp_path: Path) -> None:
    modes = [word for mode in ("turbo", "int8", "half", "fp8", "fp16") for word in ("--mode", mode)]
    result = run("prefill", *TOY, *modes, "--out", str(tmp_path / "new"), "--json")
    report = last_json(result)
    assert report == json.loads((tmp_path / "new" / "prefill.json").read_text())
    assert report["options"]["seed"] == 0
    assert report["facts"]["versions"]["torch"]
    rows = {(row["method"], row["case"] == "1x70 causal"): row for row in report["rows"]}
    assert set(rows) == {(m, c) for m in ("SDPA math", "turbo", "int8", "half", "fp8", "fp16") for c in (True, False)}
    for (method, causal), row in rows.items():
        flops = PromptCase("", SHAPES["qwen2.5-0.5b"], 1, 70, causal).flops
        assert row["figures"]["TFLOP/s"] == pytest.approx(flops / 1e9 / row["figures"]["ms"])
        assert row["rounds"] >= 5
        assert (row["figures"]["quantize ms"] is not None) == (method in ("turbo", "int8", "half", "fp8"))
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
            options["scoring"] = Scoring(options["scoring"].scaling * 1.2)
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
def test_a_wrong_result_is_not_timed(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "prefill", broken(how))
    check_not_timed(message, "ms", "prefill", *TOY, "--causal", "--mode", "turbo")


@pytest.mark.parametrize("mode", ["fp16", "half", "turbo"])
def test_the_budget_is_what_the_mode_costs_and_little_more(mode: str) -> None:
    """A result right in itself passes, and would not if its error were three times as large."""
    case = PromptCase("", SHAPES["qwen2.5-0.5b"], 2, 150, True)
    q, k, v = inputs(case, torch.float16, CPU, 0)
    options: dict[str, Any] = {"scoring": Scoring(0.125), "rounding": Rounding(mode), "causal": True}
    sample = Sample(q, k, v, scaling=0.125, causal=True, seed=0)
    got = op.prefill(q, k, v, **options)
    passed = verify(got, sample, options)
    assert not passed.problem
    exact = torch.stack([attend(q[b], k[b], v[b], scaling=0.125, causal=True).out for b in range(2)])
    worse = exact + (passed.budget / passed.worst) * 1.5 * (got.out - exact)
    assert "a query is off by" in verify(AttentionOutput(worse, got.lse), sample, options).problem


def test_modes_rank_by_what_they_round() -> None:
    case = PromptCase("", SHAPES["qwen2.5-0.5b"], 1, 192, False)
    q, k, v = inputs(case, torch.float16, CPU, 0)
    sample = Sample(q, k, v, scaling=0.125, causal=False, seed=0)
    error = {
        mode: sample.error(op.prefill(q, k, v, Scoring(0.125), Rounding(mode), causal=False).out)
        for mode in ("fp16", "half", "turbo", "int8", "fp8")
    }
    # rounding V and P too costs more than rounding Q and K; three bits of mantissa cost more than seven bits
    assert error["fp16"] < error["half"] < min(error["turbo"], error["int8"])
    assert error["half"] < error["fp8"]
