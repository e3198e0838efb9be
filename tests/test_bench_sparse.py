"""Sparse steps of `turbo-hf bench decode` at toy size on the CPU: layers, checks, figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import CPU, last_json, run

from turbo_hf.eval.bench import sparse as bench
from turbo_hf.eval.bench.shapes import Case, make_case
from turbo_hf.eval.bench.sparse import (
    SELECTORS,
    Choice,
    attention,
    check_sparse,
    make_layers,
    select,
)
from turbo_hf.layout import AlwaysRead, AttentionOutput
from turbo_hf.ops.store.quantize import dequantize

SMALL = Choice("saap", (0.25,), buckets=16, hidden=8, always=AlwaysRead(1, 20))
TOY = ["decode", "--device", "cpu", "--shape", "qwen2.5-0.5b", "--size", "2x150", "--seconds", "0"]
TOY += ["--buckets", "16", "--hidden", "8", "--window", "20", "--share", "0.25"]
SAAP = [*TOY, "--selector", "saap"]


def toy() -> Case:
    return make_case("qwen2.5-0.5b", "2x150", False, 0)


def test_layers_share_nothing_and_are_ready() -> None:
    first, second = make_layers(toy(), "mixed", SMALL, 2, CPU, 0)
    blocks = first.index[:, :, :128].unflatten(-1, (2, 64))
    assert torch.equal(first.spans, torch.stack((blocks.amin(-1), blocks.amax(-1)), -1))
    (longer,) = make_layers(make_case("qwen2.5-0.5b", "1x300", False, 0), "4", SMALL, 1, CPU, 0)
    # but for the first block, the window and 64 tokens to spare, tokens stand in the order of their buckets
    assert bool((longer.index[..., 64:192].diff() >= 0).all())
    assert not bool((longer.index[..., 192:].diff() >= 0).all())
    assert not torch.equal(*(dequantize(layer.store, torch.float32)[1] for layer in (first, second)))
    assert not torch.equal(first.index, second.index)
    assert not torch.equal(first.centroids, second.centroids)
    assert first.index.shape == (2, 2, 150)
    assert int(first.index.max()) < 16


@pytest.mark.parametrize(("width", "selector"), [*(("4", name) for name in SELECTORS), ("16", "kmeans")])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_right_step_passes_and_a_wrong_one_does_not(backend: str, width: str, selector: str) -> None:
    case = toy()
    (layer,) = make_layers(case, width, replace(SMALL, selector=selector), 1, CPU, 0)
    assert (layer.classifier is None, layer.rotary is None) == (selector != "saap", selector == "kmeans-rotated")
    q = torch.randn(2, 14, 1, 64).half()
    visited = select(layer, q, torch.randn(2, 2, 1, 64).half(), 4, backend)
    assert visited.shape == (2, 2, 1, 16)
    assert bool((visited.sum(-1) == 4).all())
    got = attention(layer, q, visited, SMALL, backend)
    assert not check_sparse(case, q, layer, visited, SMALL, got).problem
    other = attention(layer, q, ~visited, SMALL, backend)
    assert "a query is off by" in check_sparse(case, q, layer, visited, SMALL, other).problem


def test_the_table_the_json_and_the_file(tmp_path: Path) -> None:
    result = run(*SAAP, "--share", "0.5", "--out", str(tmp_path / "new"), "--json")
    report = last_json(result)
    assert report == json.loads((tmp_path / "new" / "decode.json").read_text())
    rows, steps = {row["method"]: row for row in report["rows"]}, ("4 bit, saap, 25.00%", "4 bit, saap, 50.00%")
    assert list(rows) == ["SDPA math", "4 bit", *steps]
    for row in rows.values():
        assert row["figures"]["us"] > 0
    for name in steps:
        assert rows[name]["check"]["worst"] <= rows[name]["check"]["budget"]
        assert set(rows[name]["speedup"]) == {"SDPA math"}
    assert "4 of 16 buckets" in rows["4 bit, saap, 25.00%"]["note"]
    assert rows["4 bit, saap, 25.00%"]["bytes"] < rows["4 bit, saap, 50.00%"]["bytes"]
    assert "On a CPU" in result.stdout


def test_the_table_of_several_selectors() -> None:
    options = ["--selector", "saap", "--selector", "kmeans", "--json"]
    rows = {row["method"]: row for row in last_json(run(*TOY, *options))["rows"]}
    by_classifier, by_centroids = "4 bit, saap, 25.00%", "4 bit, kmeans, 25.00%"
    assert list(rows) == ["SDPA math", "4 bit", by_classifier, by_centroids]
    assert rows[by_centroids]["bytes"] < rows[by_classifier]["bytes"]


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.attention

    def wrong(*args: Any, **options: Any) -> AttentionOutput:
        out, lse = right(*args, **options)
        return AttentionOutput(out * 1.5, lse)

    monkeypatch.setattr(bench, "attention", wrong)
    result = run(*SAAP, "--json", code=1)
    rows = {row["method"]: row for row in last_json(result)["rows"]}
    assert rows["4 bit, saap, 25.00%"]["figures"] == {}
    assert "wrong: a query is off by" in rows["4 bit, saap, 25.00%"]["note"]
    assert rows["4 bit"]["figures"]["us"] > 0
