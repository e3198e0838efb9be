"""`turbo-hf bench decode` and `bench prefill` at toy size on the CPU: caches, checks, figures, files."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import last_json, run
from op_calls import ops_like

from turbo_hf.eval.bench import decode as bench
from turbo_hf.eval.bench import shapes, sparse
from turbo_hf.eval.bench.checked import Sample, verify
from turbo_hf.eval.bench.decode import check_decode
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.prefill import inputs
from turbo_hf.eval.bench.random_cache import packed_stores
from turbo_hf.eval.bench.sparse import SELECTORS, Choice, attention, check_sparse, make_layers, select
from turbo_hf.eval.bench.timing import Conditions, Rotation, Stopwatch, cold_copies
from turbo_hf.layout import AlwaysRead, AttentionOutput, Rounding, Scoring
from turbo_hf.ops.decode.contract import DecodeOps
from turbo_hf.ops.prefill.contract import PrefillOps
from turbo_hf.ops.store.quantize import dequantize

CPU = torch.device("cpu")
STEP = ["bench", "decode", "--device", "cpu", "--shape", "qwen2.5-0.5b", "--size", "2x150", "--seconds", "0"]
PROMPT = ["bench", "prefill", "--device", "cpu", "--shape", "qwen2.5-0.5b", "--size", "1x70", "--seconds", "0"]
SPARSE = [*STEP[:-3], "1x4300", *STEP[-2:], "--share", "0.25", "--selector", "saap"]
SMALL = Choice("saap", (0.25,), buckets=16, hidden=8, always=AlwaysRead(1, 20))


def toy(size: str = "3x150", *, ragged: bool = True, shape: str = "qwen2.5-0.5b") -> shapes.Case:
    return shapes.make_case(shape, size, ragged, 0)


def a_query(case: shapes.Case) -> torch.Tensor:
    return torch.randn(len(case.lengths), case.heads.query, 1, case.heads.dim, dtype=torch.float16)


# --- cases and caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", shapes.WIDTHS)
def test_bytes_are_those_of_the_cache(width: str) -> None:
    case = toy()
    groups = shapes.groups_of(width, case.heads.kv)
    (store,) = packed_stores(case, groups, 1, CPU, 0)
    pages = sum(x.nbytes for group in store.paged for x in (group.k, group.v, group.meta, group.size))
    token = sum(x[0, :, :, 0].nbytes for x in (store.k_open.mT, store.v_open))
    token += sum(x[0, :, 0].nbytes for x in (store.k_scale, store.v_scale))
    assert case.packed_bytes(groups) == pages + token * int(store.open_len.sum())
    assert case.dense_bytes(2) == 2 * 3 * 150 * 2 * 64 * 2


def test_caches_share_no_page_and_differ() -> None:
    case = toy()
    stores = packed_stores(case, shapes.groups_of("mixed", case.heads.kv), 3, CPU, 0)
    pages = [store.table[row, :n].tolist() for store in stores for row, n in enumerate(store.sealed.tolist())]
    assert sorted(page for row in pages for page in row) == list(range(stores[0].paged[0].k.shape[0]))
    dense = [dequantize(store, torch.float32)[0] for store in stores]
    assert not torch.equal(dense[0], dense[1])
    again = packed_stores(case, shapes.groups_of("mixed", case.heads.kv), 3, CPU, 0)
    assert torch.equal(dequantize(again[2], torch.float32)[0], dense[2])


def test_sparse_layers_share_nothing_and_are_ready() -> None:
    first, second = make_layers(toy("2x150", ragged=False), "mixed", SMALL, 2, CPU, 0)
    blocks = first.index[:, :, :128].unflatten(-1, (2, 64))
    assert torch.equal(first.spans, torch.stack((blocks.amin(-1), blocks.amax(-1)), -1))
    (longer,) = make_layers(shapes.make_case("qwen2.5-0.5b", "1x300", False, 0), "4", SMALL, 1, CPU, 0)
    # but for the first block, the window and 64 tokens to spare, tokens stand in the order of their buckets
    assert bool((longer.index[..., 64:192].diff() >= 0).all())
    assert not bool((longer.index[..., 192:].diff() >= 0).all())
    assert not torch.equal(*(dequantize(layer.store, torch.float32)[1] for layer in (first, second)))
    assert not torch.equal(first.index, second.index)
    assert not torch.equal(first.centroids, second.centroids)
    assert first.index.shape == (2, 2, 150)
    assert int(first.index.max()) < 16


# --- the check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "selector"), [*(("4", name) for name in SELECTORS), ("16", "kmeans")])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_right_sparse_step_passes_and_a_wrong_one_does_not(backend: str, width: str, selector: str) -> None:
    case = toy("2x150", ragged=False)
    (layer,) = make_layers(case, width, replace(SMALL, selector=selector), 1, CPU, 0)
    assert (layer.classifier is None, layer.rotary is None) == (selector != "saap", selector == "kmeans-rotated")
    q = a_query(case)
    ops = ops_like(q, backend, layer.store)
    visited = select(layer, q, torch.randn(2, 2, 1, 64).half(), 4, ops)
    assert visited.shape == (2, 2, 1, 16)
    assert bool((visited.sum(-1) == 4).all())
    got = attention(layer, q, visited, SMALL, ops)
    assert not check_sparse(case, q, layer, visited, SMALL, got).problem
    other = attention(layer, q, ~visited, SMALL, ops)
    assert "a query is off by" in check_sparse(case, q, layer, visited, SMALL, other).problem


def test_the_budget_of_a_step_is_what_the_roundings_cost_and_little_more() -> None:
    case = toy()
    (store,) = packed_stores(case, shapes.groups_of("4", case.heads.kv), 1, CPU, 1)
    q = a_query(case)
    got = ops_like(q, store=store).decode(q, store, Scoring(0.125))
    passed = check_decode(case, q, store, got)
    k, v = dequantize(store, torch.float64)
    rows = [
        attend(q[row], k[row, :, :n], v[row, :, :n], scaling=0.125, causal=False).out
        for row, n in enumerate(case.lengths)
    ]
    exact = torch.stack(rows)
    worse = exact + (passed.budget / passed.worst) * 1.5 * (got.out - exact)
    assert "a query is off by" in check_decode(case, q, store, AttentionOutput(worse, got.lse)).problem


@pytest.mark.parametrize("mode", ["native", "half", "turbo"])
def test_the_budget_of_a_prompt_is_what_the_mode_costs_and_little_more(mode: str) -> None:
    """A result right in itself passes, and would not if its error were three times as large."""
    case = shapes.PromptCase("", shapes.SHAPES["qwen2.5-0.5b"], 2, 150)
    q, k, v = inputs(case, CPU, 0)
    options: dict[str, Any] = {"scoring": Scoring(0.125), "rounding": Rounding(mode)}
    sample = Sample(q, k, v, scaling=0.125, seed=0)
    got = ops_like(q).prefill(q, k, v, **options)
    passed = verify(got, sample, options)
    assert not passed.problem
    exact = torch.stack([attend(q[b], k[b], v[b], scaling=0.125, causal=True).out for b in range(2)])
    worse = exact + (passed.budget / passed.worst) * 1.5 * (got.out - exact)
    assert "a query is off by" in verify(AttentionOutput(worse, got.lse), sample, options).problem


def broken(how: str, right: Any) -> Any:
    """An op with one thing wrong."""

    def op(ops: Any, q: torch.Tensor, *inputs: Any, **options: Any) -> AttentionOutput:
        given = list(inputs)
        if how == "scale" and "scoring" in options:
            options["scoring"] = Scoring(options["scoring"].scaling * 1.2)
        elif how == "scale":
            given[1] = Scoring(given[1].scaling * 1.2)
        if how == "raises":
            raise RuntimeError("out of registers")
        if how == "refuses":
            raise ValueError("q is on another GPU.")
        out, lse = right(ops, q, *given, **options)
        if how == "row":
            out[0, -1, -1] = out[0, -1, -2]
        if how == "unwritten":
            out[0, 3] = torch.empty_like(out[0, 3])
        if how == "lse":
            lse = lse / 0.6931
        return AttentionOutput(out, lse)

    return op


def check_not_timed(message: str, figure: str, *words: str) -> None:
    """What is wrong with ours is told, and it has no figure; the baseline keeps its own."""
    result = run(*words, "--json", code=1)
    baseline, ours = last_json(result)["rows"]
    assert ours["figures"] == {}
    assert message in ours["note"]
    assert message in " ".join(result.stderr.split())
    assert baseline["figures"][figure] > 0


WRONG = {"unwritten": "the result has elements that are NaN or infinite, or that nothing wrote", "lse": "an lse is off"}


@pytest.mark.parametrize("how", ["scale", "row", "unwritten", "lse", "raises", "refuses"])
def test_a_wrong_result_is_not_timed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"raises": "failed: RuntimeError: out of registers", "refuses": "refused: q is on another GPU."}.get(
        how, f"wrong: {WRONG.get(how, 'a query is off by')}"
    )
    if how != "row":
        monkeypatch.setattr(DecodeOps, "decode", broken(how, DecodeOps.decode))
        check_not_timed(message, "us", *STEP)
    monkeypatch.setattr(PrefillOps, "prefill", broken(how, PrefillOps.prefill))
    check_not_timed(message, "ms", *PROMPT, "--mode", "turbo")


def test_a_wrong_sparse_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sparse.attention

    def wrong(*args: Any, **options: Any) -> AttentionOutput:
        out, lse = right(*args, **options)
        return AttentionOutput(out * 1.5, lse)

    monkeypatch.setattr(sparse, "attention", wrong)
    rows = {row["method"]: row for row in last_json(run(*SPARSE, "--json", code=1))["rows"]}
    assert rows["4 bit, saap, 25.00%"]["figures"] == {}
    assert "wrong: a query is off by" in rows["4 bit, saap, 25.00%"]["note"]
    assert rows["4 bit"]["figures"]["us"] > 0


# --- the clock and the report ---------------------------------------------------------------------------------------


def test_a_rotation_runs_its_calls_in_turn() -> None:
    order: list[str] = []
    rotation = Rotation([partial(order.append, name) for name in "abc"], CPU)
    rotation()
    assert order == ["a", "b", "c"]
    assert rotation.launches == 3
    assert rotation.eager_us() > 0
    assert order[3:] == ["a"]
    assert cold_copies(1 << 40, CPU) == 2


def written(folder: Path, name: str, *words: str) -> tuple[Any, dict[str, Any]]:
    """A bench's report, which is also in its file, and its rows by method and case."""
    result = run(*words, "--out", str(folder / "new"), "--json")
    report = last_json(result)
    assert report == json.loads((folder / "new" / f"{name}.json").read_text())
    assert "On a CPU" in result.stdout
    for row in report["rows"]:
        assert row["rounds"] >= 5
        if row["ours"]:
            assert row["check"]["worst"] <= row["check"]["budget"]
            assert set(row["speedup"]) == {"SDPA math"}
    return report, {f"{row['method']}, {row['case']}": row for row in report["rows"]}


def test_decode_prints_tables_json_and_files(tmp_path: Path) -> None:
    widths = [word for width in ("8", "mixed") for word in ("--width", width)]
    report, rows = written(tmp_path, "decode", *STEP, *widths, "--ragged")
    assert report["options"]["widths"] == ["8", "mixed"]
    assert list(rows) == [f"{name}, 2x150 ragged" for name in ("SDPA math", "8 bit", "mixed 4/2")]
    dense, eight, mixed = rows.values()
    for row in rows.values():
        figures = row["figures"]
        assert figures["TB/s"] == pytest.approx(row["bytes"] / figures["us"] / 1e6)
        assert figures["of copy"] == pytest.approx(figures["TB/s"] / report["copy_tb_s"])
        assert figures["eager us"] > 0
    assert dense["note"] == "rows padded to the longest, without a mask"
    assert mixed["bytes"] < eight["bytes"] < dense["bytes"]


def test_prefill_prints_tables_json_and_files(tmp_path: Path) -> None:
    ours = ("turbo", "int8", "half", "fp8", "native")
    report, rows = written(tmp_path, "prefill", *PROMPT, *(word for mode in ours for word in ("--mode", mode)))
    assert report["options"]["seed"] == 0
    assert report["facts"]["versions"]["torch"]
    assert set(rows) == {f"{m}, 1x70 causal" for m in ("SDPA math", *ours)}
    for row in rows.values():
        flops = shapes.PromptCase("", shapes.SHAPES["qwen2.5-0.5b"], 1, 70).flops
        assert row["figures"]["TFLOP/s"] == pytest.approx(flops / 1e9 / row["figures"]["ms"])
        assert (row["figures"]["quantize ms"] is not None) == (row["method"] in ours[:-1])


def test_sparse_steps_stand_beside_dense_ones(tmp_path: Path) -> None:
    _, rows = written(tmp_path, "decode", *SPARSE, "--share", "0.5", "--selector", "kmeans")
    steps = [f"4 bit, {name}, {share}" for name in ("saap", "kmeans") for share in ("25.00%", "50.00%")]
    assert list(rows) == [f"{name}, 1x4300" for name in ("SDPA math", "4 bit", *steps)]
    few, more, by_centroids, _ = (rows[f"{name}, 1x4300"] for name in steps)
    assert "256 of 1024 buckets" in few["note"]
    assert by_centroids["bytes"] < few["bytes"] < more["bytes"]


def test_latents_are_timed_beside_torch_and_our_own_16_bit() -> None:
    case = shapes.make_case("deepseek-v2-lite", "1x130", False, 0)
    rows = bench.run_case(case, ["4", "3"], Conditions(Stopwatch(CPU), "auto", 0, 0), 1.0)
    assert [row.method for row in rows if row.ours] == ["latent 16 bit", "latent 4 bit", "latent 3 bit"]
    assert all(row.figures["us"] for row in rows[:-1])
    assert all(row.check is not None and not row.check.problem for row in rows[:-1] if row.ours)
    assert rows[-1].note == "a latent has 16, 8 or 4 bit here; not 3"


def test_fp16_that_does_not_fit_is_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(bench, "sdpa_rivals", full)
    theirs, ours = last_json(run(*STEP, "--json"))["rows"]
    assert theirs["figures"] == {}
    assert "do not fit beside the rest" in theirs["note"]
    assert ours["figures"]["us"] > 0
    assert ours["speedup"] == {}


@pytest.mark.gpu
def test_decode_on_a_gpu_replays_graphs() -> None:
    words = ["--device", "cuda", "--shape", "llama3-8b", "--size", "2x1k", "--seconds", "0", "--json"]
    found = last_json(run("bench", "decode", *words, "--width", "4", "--width", "mixed"))
    rows = {row["method"]: row["figures"] for row in found["rows"]}
    assert set(rows) == {"cuDNN", "FA2", "4 bit", "mixed 4/2"}
    # a launch in a graph does not wait for the host
    assert 0 < rows["4 bit"]["us"] < rows["4 bit"]["eager us"]
