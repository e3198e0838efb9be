"""Attention over the keys that are kept, against the same in float64; how a launch is shared out; what is refused."""

from typing import Any

import pytest
import torch
from budgets import check_turbo
from hypothesis import given
from hypothesis import strategies as st
from op_calls import sparse_decode
from oracle import Codes
from prefill_support import step_queries
from sas_support import check_sas
from sparse_attention_support import CHOICE, check_sparse, kept_keys, random_index, spans_of, sparse_store
from stores import store_codes, tokens

from turbo_hf.layout import AttentionOutput, HeadGroups
from turbo_hf.ops import gpu
from turbo_hf.ops.tuning import DecodeTiles

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(
    ("share", "dtype"),
    [(0.3, torch.float16), (0.3, torch.bfloat16), (0.3, torch.float32), (0.0, torch.float16), (1.0, torch.bfloat16)],
    ids=str,
)
def test_ragged_rows(share: float, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    store = sparse_store([130, 1, 64, 63, 65], 2, 64, device)
    index, visited = random_index(store, 1, 9, share)
    check_sparse(tokens(5, 8, 1, 64, dtype=dtype, device=device), store, index, visited, backend)


@pytest.mark.parametrize(("bits", "dim"), [(16, 128), (8, 16), (4, 80), (3, 128), (2, 16)])
def test_head_dims_and_bits(dim: int, bits: int, device: torch.device, backend: str) -> None:
    store = sparse_store([200, 70], 2, dim, device, groups=((bits, 2),))
    index, visited = random_index(store, 2, 9, 0.3)
    q = tokens(2, 4, 2, dim, device=device)
    check_sparse(q, store, index, visited, backend, starts=[0, 1])


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (14, 2), (24, 1)])
def test_head_groups(heads: int, kv_heads: int, device: torch.device, backend: str) -> None:
    store = sparse_store([200], kv_heads, 32, device)
    index, visited = random_index(store, 1, 9, 0.3)
    check_sparse(tokens(1, heads, 1, 32, device=device), store, index, visited, backend)


@pytest.mark.parametrize("block", [32, 128])
def test_mixed_widths_and_blocks(block: int, device: torch.device, backend: str) -> None:
    store = sparse_store([300, 20], 3, 32, device, groups=((4, 2), (2, 1)), block=block)
    index, visited = random_index(store, 3, 5, 0.4)
    check_sparse(tokens(2, 6, 3, 32, device=device), store, index, visited, backend, starts=[0, 2])


@pytest.mark.parametrize(
    "options",
    [
        {"sink_tokens": 0, "window_tokens": 1},
        {"sink_tokens": 70, "window_tokens": 64},
        {"sink_tokens": 3, "window_tokens": 1000},
        {"sink_tokens": 1 << 30, "window_tokens": 1 << 30},
        {"softcap": 2.0},
        {"sinks": True},
        {"softcap": 5.0, "sinks": True, "window_tokens": 3},
    ],
    ids="-".join,
)
def test_options(options: dict[str, Any], device: torch.device, backend: str) -> None:
    store = sparse_store([150, 40], 2, 32, device)
    index, visited = random_index(store, 2, 9, 0.2)
    check_sparse(tokens(2, 4, 2, 32, device=device), store, index, visited, backend, **options)


def test_always_read_tokens_alone(device: torch.device, backend: str) -> None:
    store = sparse_store([150, 40], 2, 32, device)
    check_sparse(tokens(2, 4, 1, 32, device=device), store, None, None, backend)


@pytest.mark.parametrize(
    ("threshold", "groups"),
    [(None, ((4, 2),)), (None, ((4, 1), (2, 1))), (-6.0, ((4, 1), (2, 1))), (None, (((4, 2), 1), ((8, 3), 1)))],
    ids=str,
)
def test_on_quantized_values(threshold: float | None, groups: HeadGroups, device: torch.device, backend: str) -> None:
    """Mode "turbo": 16-bit queries over INT8 codes of the kept keys, P in INT8, whose steps are all that is missed."""
    store = sparse_store([300, 70, 20], 2, 64, device, groups=groups)
    index, visited = random_index(store, 2, 9, 0.3)
    q = tokens(3, 8, 2, 64, device=device)
    options: dict[str, Any] = {"sas_threshold": threshold, "spans": spans_of(store, index), "backend": backend}
    got = sparse_decode(q, store, index, visited, scaling=0.05, sink_tokens=1, window_tokens=20, **options)
    fake = step_queries(q, [0] * 3)
    for row, codes in enumerate(store_codes(store)):
        assert codes.fold is not None
        for head, column in ((0, 0), (1, 0), (0, 1), (1, 1)):
            buckets, seen = index[row, head].tolist(), visited[row, head, column].tolist()
            kept = kept_keys(codes.k.shape[1] - 2 + column, buckets, seen, 1, 20)
            k, k_scale, v, v_scale = (x[head : head + 1, kept] for x in codes[:4])
            own = Codes(k, k_scale, v, v_scale, codes.tile[kept], codes.fold[head : head + 1, kept])
            at = (slice(row, row + 1), slice(4 * head, 4 * head + 4), slice(column, column + 1))
            part = AttentionOutput(got.out[at], got.lse[at])
            if threshold is None:
                check_turbo(part, fake[at], q.dtype, [own], scaling=0.05)
            else:
                check_sas(part, fake[at], [own], threshold, rounds_p=True, scaling=0.05)


def test_on_keys_that_are_not_rounded(device: torch.device, backend: str) -> None:
    store = sparse_store([200, 70], 2, 64, device, groups=((16, 2),))
    index, visited = random_index(store, 2, 9, 0.3)
    check_sparse(tokens(2, 8, 2, 64, device=device), store, index, visited, backend, mode="turbo")


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    share=st.floats(0, 1),
    queries=st.integers(1, 3),
    sink=st.integers(0, 4),
    window=st.integers(1, 80),
)
def test_any_choice_of_keys(lengths: list[int], share: float, queries: int, sink: int, window: int) -> None:
    queries = min(queries, *lengths)
    store = sparse_store(lengths, 1, 16, torch.device("cpu"))
    index, visited = random_index(store, queries, 5, share)
    q = tokens(len(lengths), 2, queries, 16)
    check_sparse(q, store, index, visited, "reference", sink_tokens=sink, window_tokens=window)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": torch.zeros(2, 4, 1, 32)}, r"q must be \[1, Hq, M, D\] on cpu"),
        ({"softcap": -1.0}, "softcap must be above 0"),
    ],
)
def test_sparse_decode_says_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    store = sparse_store([100], 2, 32, torch.device("cpu"))
    index, visited = random_index(store, 1, 4, 0.5)
    given: dict[str, Any] = {"q": torch.zeros(1, 4, 1, 32), "buckets": index, "visited": visited, **CHOICE, **wrong}
    with pytest.raises(ValueError, match=message):
        sparse_decode(given.pop("q"), store, given.pop("buckets"), given.pop("visited"), **given)


def test_sparse_decode_refuses_lengths_that_are_not_the_caches() -> None:
    store = sparse_store([100], 2, 32, torch.device("cpu"))._replace(open_len=torch.tensor([1, 1, 1]))
    index, visited = random_index(store, 1, 4, 0.5)
    with pytest.raises(ValueError, match=r"store.open_len must be \[1\] on cpu; got torch.int64 \[3\]"):
        sparse_decode(torch.zeros(1, 4, 1, 32), store, index, visited, **CHOICE)


@pytest.mark.parametrize(("ctas", "blocks", "scan"), [(3, 1, 2), (16, 2, 1), (50, 4, 4), (1, 2, 8), (90, 1, 16)])
def test_many_shares(ctas: int, blocks: int, scan: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("turbo_hf.ops.sparse.launch")
    decode_launch = pytest.importorskip("turbo_hf.ops.decode.launch")
    monkeypatch.setattr(launch, "SCAN", scan)
    monkeypatch.setattr(gpu, "sms", lambda device: ctas)
    monkeypatch.setattr(decode_launch, "decode_tiles", lambda *args, **options: DecodeTiles(blocks, 1, 2, 4))
    launch._workspace.cache_clear()
    store = sparse_store([230, 3, 170], 2, 32, device, block=32)
    index, visited = random_index(store, 2, 9, 0.3)
    q, starts = tokens(3, 4, 2, 32, device=device), [0, 1, 0]
    got = check_sparse(q, store, index, visited, "triton", starts=starts)
    # counters are zeros again
    options = CHOICE | {
        "spans": spans_of(store, index),
        "mode": "native",
        "starts": torch.tensor(starts, device=device),
    }
    again = sparse_decode(q, store, index, visited, **options, backend="triton")
    assert torch.equal(again.out, got.out)
    assert torch.equal(again.lse, got.lse)
    launch._workspace.cache_clear()


@pytest.mark.parametrize(("buckets", "share"), [(3, 0.2), (30, 0.01), (60, 0.2)])
def test_blocks_without_a_visited_bucket_are_not_read(share: float, buckets: int, device: torch.device) -> None:
    pytest.importorskip("triton")
    store = sparse_store([400], 2, 32, device, block=32)
    _, visited = random_index(store, 2, buckets, share)
    index = torch.randint(0, buckets, (1, 2, 400), device=device).sort(-1).values.to(torch.int16)
    q = tokens(1, 4, 2, 32, device=device)
    got = check_sparse(q, store, index, visited, "triton")
    # what no query reads may hold anything
    blocks = index[0, :, :384].unflatten(-1, (12, 32)).long()
    asked = visited[0].any(1).gather(-1, blocks.flatten(1)).view_as(blocks).any(-1).any(0)
    # first and newest tokens, and the block of which nothing is known
    asked[[0, 6, 11]] = True
    assert bool((blocks[..., -1] - blocks[..., 0] < 8).all()), "blocks so wide are read without a look"
    assert share > 0.1 or not bool(asked.all())
    for pages in store.paged:
        pages.size[store.table[0, ~asked]] = torch.nan
    options = CHOICE | {"spans": spans_of(store, index), "mode": "native"}
    again = sparse_decode(q, store, index, visited, **options, backend="triton")
    assert torch.equal(again.out, got.out)


def test_launches_that_are_replayed_keep_their_workspace(device: torch.device) -> None:
    launch = pytest.importorskip("turbo_hf.ops.sparse.launch")
    store = sparse_store([150, 3, 90], 2, 32, device)
    index, visited = random_index(store, 1, 9, 0.3)
    q = tokens(3, 4, 1, 32, device=device)
    want = check_sparse(q, store, index, visited, "triton")
    plans: dict[Any, Any] = {}
    held: set[int] = set()
    for _ in range(3):
        got = check_sparse(q, store._replace(plans=plans), index, visited, "triton")
        assert torch.equal(got.out, want.out)
        # others have come between, and theirs is the one that is remembered
        launch._workspace.cache_clear()
        held.update(id(kept.words) for kept in plans.values())
    assert len(held) == 1
    assert launch._workspace.cache_info().currsize == 0
