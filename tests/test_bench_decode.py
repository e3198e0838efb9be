"""`turbo-hf bench decode` at toy size on the CPU: caches, checks, figures, files, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from bench_support import CPU, check_not_timed, check_refused, last_json, run

from turbo_hf.eval.bench import decode as bench
from turbo_hf.eval.bench import random_cache
from turbo_hf.eval.bench.decode import check_decode
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.random_cache import one_head, packed_stores
from turbo_hf.eval.bench.rivals import Rival
from turbo_hf.eval.bench.shapes import (
    DECODE_SHAPES,
    WIDTHS,
    Case,
    choose_cases,
    groups_of,
    make_case,
    parse_tokens,
    tokens_label,
)
from turbo_hf.eval.bench.timing import Conditions, Rotation, Stopwatch, cold_copies
from turbo_hf.layout import AttentionOutput, KVStore, Scoring
from turbo_hf.ops.decode import contract as op
from turbo_hf.ops.store.quantize import dequantize

TOY = ["decode", "--device", "cpu", "--shape", "qwen2.5-0.5b", "--size", "2x150", "--seconds", "0"]


def toy(size: str = "3x150", *, ragged: bool = True, shape: str = "qwen2.5-0.5b") -> Case:
    return make_case(shape, size, ragged, 0)


def a_query(case: Case) -> torch.Tensor:
    return torch.randn(len(case.lengths), case.heads.query, 1, case.heads.dim, dtype=torch.float16)


# --- cases and caches -----------------------------------------------------------------------------------------------


def test_the_default_cases() -> None:
    cases = choose_cases([], [], False, 0)
    assert len(cases) == len(set(map(str, [(case.shape, case.lengths) for case in cases]))) == 44
    assert {case.shape for case in cases} == set(DECODE_SHAPES)
    assert {128, 136, 160} <= {case.outputs for case in cases if case.lengths[0] == 8192}
    assert (1 << 20,) in {case.lengths for case in cases}
    assert (16384,) * 64 in {case.lengths for case in cases}
    assert all(case.ragged for case in choose_cases([], [], True, 0))
    assert [str(case) for case in choose_cases(["lean-16"], ["2x100"], True, 0)] == ["2x100 ragged"]


def test_latents_are_timed_beside_torch_and_our_own_16_bit() -> None:
    case = make_case("deepseek-v2-lite", "1x130", False, 0)
    rows = bench.run_case(case, ["4", "3"], Conditions(Stopwatch(CPU), "auto", 0, 0), 1.0)
    assert [row.method for row in rows if row.ours] == ["latent 16 bit", "latent 4 bit", "latent 3 bit"]
    assert all(row.figures["us"] for row in rows[:-1])
    assert all(row.check is not None and not row.check.problem for row in rows[:-1] if row.ours)
    assert rows[-1].note == "a latent has 16, 8 or 4 bit here; not 3"
    with pytest.raises(ValueError, match="one length here; leave out --ragged"):
        choose_cases(["deepseek-v2-lite"], [], True, 0)


def test_1m_is_a_number_of_tokens() -> None:
    assert parse_tokens("1M") == 1 << 20
    assert tokens_label(1 << 20) == "1M"
    assert tokens_label(1 << 19) == "524k"


def test_ragged_rows_are_drawn_once_and_within_bounds() -> None:
    case = toy("32x8k")
    assert case == toy("32x8k")
    assert case.lengths != make_case("qwen2.5-0.5b", "32x8k", True, 1).lengths
    assert max(case.lengths) == 8192
    assert min(case.lengths) >= 1024
    assert len(set(case.lengths)) > 16
    assert toy("1x100").lengths == (100,)


@in_one_test("width", WIDTHS)
def test_bytes_are_those_of_the_cache(width: str) -> None:
    case = toy()
    groups = groups_of(width, case.heads.kv)
    (store,) = packed_stores(case, groups, 1, CPU, 0)
    pages = sum(x.nbytes for group in store.paged for x in (group.k, group.v, group.meta, group.size))
    token = sum(x[0, :, :, 0].nbytes for x in (store.k_open.mT, store.v_open))
    token += sum(x[0, :, 0].nbytes for x in (store.k_scale, store.v_scale))
    assert case.packed_bytes(groups) == pages + token * int(store.open_len.sum())
    assert case.dense_bytes(2) == 2 * 3 * 150 * 2 * 64 * 2


def test_caches_share_no_page_and_differ() -> None:
    case = toy()
    stores = packed_stores(case, groups_of("mixed", case.heads.kv), 3, CPU, 0)
    pages = [store.table[row, :n].tolist() for store in stores for row, n in enumerate(store.sealed.tolist())]
    used = [page for row in pages for page in row]
    assert sorted(used) == list(range(stores[0].paged[0].k.shape[0]))
    dense = [dequantize(store, torch.float32)[0] for store in stores]
    assert not torch.equal(dense[0], dense[1])
    again = packed_stores(case, groups_of("mixed", case.heads.kv), 3, CPU, 0)
    assert torch.equal(dequantize(again[2], torch.float32)[0], dense[2])


@pytest.mark.parametrize("size", ["3x150", "2x128", "2x20"])
def test_one_head_is_that_head(size: str) -> None:
    case = toy(size, ragged=size == "3x150", shape="llama3-8b")
    (store,) = packed_stores(case, groups_of("mixed", case.heads.kv), 1, CPU, 0)
    whole = dequantize(store, torch.float32)
    for row, head in ((0, 0), (1, 3), (len(case.lengths) - 1, 7)):
        part = dequantize(one_head(store, row, head), torch.float32)
        for x, want in zip(part, whole, strict=True):
            n = case.lengths[row]
            assert torch.equal(x[0, 0, :n], want[row, head, :n])


def test_pieces_fill_every_page(monkeypatch: pytest.MonkeyPatch, poison: None) -> None:
    monkeypatch.setattr(random_cache, "PIECE", 3 * 2 * 64 * 64)
    case = toy("1x500")
    (store,) = packed_stores(case, groups_of("4", 2), 1, CPU, 0)
    (pages,) = store.paged
    assert bool(pages.size.isfinite().all())
    # N(0, 1): no page is like another, and all are of one size
    k, _ = dequantize(store, torch.float32)
    blocks = k[0, :, :448].unflatten(1, (7, 64))
    assert bool(((blocks.std((-1, -2)) - 1).abs() < 0.1).all())
    assert len({float(x) for x in blocks.flatten()[:: 64 * 64]}) > 7


# --- the check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("width", ["4", "mixed"])
def test_a_right_result_passes(width: str, backend: str) -> None:
    case = toy("2x90")
    (store,) = packed_stores(case, groups_of(width, case.heads.kv), 1, CPU, 1)
    q = a_query(case)
    found = check_decode(case, q, store, op.decode(q, store, Scoring(0.125), backend=backend))
    assert not found.problem
    assert 0 < found.worst <= found.budget
    assert found.lse_worst <= found.lse_budget


def test_the_budget_is_what_the_roundings_cost_and_little_more() -> None:
    case = toy()
    (store,) = packed_stores(case, groups_of("4", case.heads.kv), 1, CPU, 1)
    q = a_query(case)
    got = op.decode(q, store, Scoring(0.125))
    passed = check_decode(case, q, store, got)
    k, v = dequantize(store, torch.float64)
    rows = [
        attend(q[row], k[row, :, :n], v[row, :, :n], scaling=0.125, causal=False).out
        for row, n in enumerate(case.lengths)
    ]
    exact = torch.stack(rows)
    worse = exact + (passed.budget / passed.worst) * 1.5 * (got.out - exact)
    assert "a query is off by" in check_decode(case, q, store, AttentionOutput(worse, got.lse)).problem


def broken(how: str) -> Any:
    """`ops.decode` with one thing wrong."""
    right = op.decode

    def decode(q: torch.Tensor, store: KVStore, scoring: Scoring, **options: Any) -> AttentionOutput:
        if how == "scale":
            scoring = Scoring(scoring.scaling * 1.2)
        if how == "open":
            store = store._replace(open_len=store.open_len // 2)
        if how == "page":
            store = store._replace(table=store.table.flip(0))
        if how == "raises":
            raise RuntimeError("out of registers")
        if how == "refuses":
            raise ValueError("q is on another GPU.")
        out, lse = right(q, store, scoring, **options)
        if how == "unwritten":
            out[0, 3] = torch.empty_like(out[0, 3])
        if how == "lse":
            lse = lse / 0.6931
        return AttentionOutput(out, lse)

    return decode


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("scale", "wrong: a query is off by"),
        ("open", "wrong: a query is off by"),
        ("page", "wrong: a query is off by"),
        ("unwritten", "wrong: the result has elements that are NaN or infinite, or that nothing wrote"),
        ("lse", "wrong: an lse is off by"),
        ("raises", "failed: RuntimeError: out of registers"),
        ("refuses", "refused: q is on another GPU."),
    ],
)
def test_a_wrong_result_is_not_timed(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "decode", broken(how))
    check_not_timed(message, "us", *TOY)


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


def test_decode_prints_tables_json_and_files(tmp_path: Path) -> None:
    widths = [word for width in ("8", "mixed") for word in ("--width", width)]
    result = run(*TOY, *widths, "--ragged", "--out", str(tmp_path / "new"), "--json")
    report = last_json(result)
    assert report == json.loads((tmp_path / "new" / "decode.json").read_text())
    assert report["options"]["widths"] == ["8", "mixed"]
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == ["SDPA math", "8 bit", "mixed 4/2"]
    for row in rows.values():
        figures = row["figures"]
        assert figures["TB/s"] == pytest.approx(row["bytes"] / figures["us"] / 1e6)
        assert figures["of copy"] == pytest.approx(figures["TB/s"] / report["copy_tb_s"])
        assert figures["eager us"] > 0
        assert row["rounds"] >= 5
        assert (row["case"], row["batch"], row["tokens"]) == ("2x150 ragged", 2, 150)
        if row["ours"]:
            assert row["check"]["worst"] <= row["check"]["budget"]
            assert set(row["speedup"]) == {"SDPA math"}
    assert rows["SDPA math"]["note"] == "rows padded to the longest, without a mask"
    assert rows["mixed 4/2"]["bytes"] < rows["8 bit"]["bytes"] < rows["SDPA math"]["bytes"]
    assert "On a CPU" in result.stdout


def test_fp16_that_does_not_fit_is_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(bench, "sdpa_rivals", full)
    theirs, ours = last_json(run(*TOY, "--json"))["rows"]
    assert theirs["figures"] == {}
    assert "do not fit beside the rest" in theirs["note"]
    assert ours["figures"]["us"] > 0
    assert ours["speedup"] == {}


def test_a_rival_that_cannot_run_has_a_note_and_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, fails = Rival("FA2", lambda: None), Rival("FA2", None, "cannot run: no kernel")
    assert bench._rotation([fails, fails], CPU) == (None, "cannot run: no kernel")
    rotation, note = bench._rotation([runs, runs], CPU)
    assert rotation is not None
    assert (rotation.launches, note) == (2, "")

    def raises(error: Exception, *_: Any) -> None:
        raise error

    monkeypatch.setattr(bench, "Rotation", partial(raises, RuntimeError("operation not permitted")))
    assert bench._rotation([runs], CPU) == (None, "cannot run in a graph: operation not permitted")
    monkeypatch.setattr(bench, "Rotation", partial(raises, torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(torch.OutOfMemoryError):
        bench._rotation([runs], CPU)


@pytest.mark.gpu
def test_decode_on_a_gpu_replays_graphs() -> None:
    words = ["decode", "--device", "cuda", "--shape", "llama3-8b", "--size", "2x1k", "--width", "4", "--seconds", "0"]
    rows = {row["method"]: row for row in last_json(run(*words, "--width", "mixed", "--json"))["rows"]}
    assert set(rows) == {"cuDNN", "FA2", "4 bit", "mixed 4/2"}
    # a launch in a graph does not wait for the host
    assert 0 < rows["4 bit"]["figures"]["us"] < rows["4 bit"]["figures"]["eager us"]


# --- mistakes -------------------------------------------------------------------------------------------------------


@in_one_test(
    ("words", "message"),
    [
        (["decode", "--shape", "llama9"], "unknown shape llama9; shapes are llama3-8b, phi3-medium, qwen2.5-0.5b, lea"),
        (["decode", "--size", "1k"], "expected a size like 16x1k (rows x tokens); got '1k'."),
        (["decode", "--width", "5"], "unknown width 5; choose from 16, 8, 4, 3, 2, mixed, k4v3, k4v2."),
        (["decode", "--backend", "cuda"], "unknown backend cuda; choose from auto, triton, reference."),
        (["decode", "--shape", "lean-16", "--ragged"], "no default case of lean-16 is ragged; give --size."),
        (["decode", "--device", "nowhere"], "no device 'nowhere'"),
        (["decode", "--selector", "mean"], "unknown selector mean; choose from saap, kmeans, kmeans-rotated."),
        (["decode", "--share", "0"], "a share must be above 0 and at most 1; got [0.0]."),
        (["decode", "--share", "0.1"], "--share is of sparse steps: add --selector saap."),
        (["decode", "--selector", "saap", "--shape", "deepseek-v2-lite"], "steps over latents are not sparse: leave o"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_1(words: list[str], message: str) -> None:
    check_refused(message, *words)
