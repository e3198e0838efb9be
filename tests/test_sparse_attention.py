"""Attention over the keys that are kept."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefill_support import int8_queries
from support import Codes, check, check_turbo, float_budget, largest, make_store, store_codes, tokens
from test_sas import check_sas
from torch import Tensor

from turbo_hf.layout import BITS, AttentionOutput, KVStore
from turbo_hf.ops import gpu
from turbo_hf.ops.select import visit
from turbo_hf.ops.sparse import sparse_decode
from turbo_hf.ops.tuning import DecodeTiles

pytestmark = pytest.mark.usefixtures("poison")
CHOICE: dict[str, Any] = {"scaling": 0.125, "sink_tokens": 1, "window_tokens": 20}


def sparse_store(lengths: Sequence[int], heads: int, dim: int, device: torch.device, **how: Any) -> KVStore:
    """A cache of random tokens."""
    k, v = (tokens(len(lengths), heads, max(lengths), dim, device=device) for _ in range(2))
    if "groups" in how and "order" not in how:
        how["order"] = torch.rand(len(lengths), heads).argsort(-1)
    return make_store(k, v, lengths, **how)


def random_index(
    store: KVStore, queries: int, buckets: int, share: float, tables: int = 1, query_heads: int = 0
) -> tuple[Tensor, Tensor]:
    """Buckets of every token, some of them unknown, and visits of a share of them: of KV heads or of `query_heads`."""
    rows, heads = store.order.shape
    cap = int((store.sealed * store.block + store.open_len).max())
    device = store.order.device
    index = torch.randint(-1, buckets, (rows, heads, tables, cap + 7), device=device).to(torch.int16)
    # the first row's tokens in the order of their buckets, as those of a prompt stand
    index[0] = index[0].sort(-1).values
    return index, torch.rand(rows, query_heads or heads, queries, tables, buckets, device=device) < share


def spans_of(store: KVStore, index: Tensor | None) -> Tensor | None:
    """The smallest and the largest bucket of sealed blocks; of one of them none is known."""
    blocks = store.table.shape[1]
    if index is None or not blocks:
        return None
    own = index[:, :, 0, : blocks * store.block]
    own = torch.nn.functional.pad(own, (0, blocks * store.block - own.shape[-1]), value=-1).unflatten(-1, (blocks, -1))
    spans = torch.stack((own.amin(-1), own.amax(-1)), -1)
    spans[:, :, blocks // 2] = -1
    return spans


def kept_keys(
    place: int, bucket: list[list[int]], visited: list[list[bool]], sink: int, window: int, meetings: int
) -> list[int]:
    """Places that a query reads. bucket: by table and place; visited: by table and bucket."""
    found = []
    for t in range(place + 1):
        met = sum(own[t] < 0 or seen[own[t]] for own, seen in zip(bucket, visited, strict=True))
        if t < sink or t > place - window or (bool(bucket) and met >= meetings):
            found.append(t)
    return found


def check_sparse(
    q: Tensor,
    store: KVStore,
    index: Tensor | None,
    visited: Tensor | None,
    backend: str,
    *,
    starts: Sequence[int] | None = None,
    **options: Any,
) -> AttentionOutput:
    """Assert that `sparse_decode` is attention in float64 over the kept keys, and counts them."""
    choice = CHOICE | {"spans": spans_of(store, index), "mode": "fp16"} | options
    if choice.get("sinks") is True:
        choice["sinks"] = torch.randn(q.shape[1], device=q.device) * 3
    read = torch.full((1,), 5, dtype=torch.int64, device=q.device)
    first = None if starts is None else torch.tensor(starts, device=q.device)
    got = sparse_decode(q, store, index, visited, starts=first, read=read, backend=backend, **choice)
    assert got.out.dtype == q.dtype
    assert got.lse.dtype == torch.float32
    exact, eager = (naive(q, store, index, visited, starts, choice, dtype) for dtype in (torch.float64, q.dtype))
    values = max(largest(row.values()[1]) for row in store_codes(store))
    check("out", got.out, exact[0], float_budget(exact[0], eager[0], values, q.dtype))
    scores = largest(exact[1]) + values * largest(q) * q.shape[-1] ** 0.5
    check("lse", got.lse, exact[1], float_budget(exact[1], eager[1], scores, q.dtype))
    assert not got.out.cpu()[exact[1].isneginf()].any()
    assert int(read) == 5 + exact[2]
    return got


def naive(
    q: Tensor,
    store: KVStore,
    index: Tensor | None,
    visited: Tensor | None,
    starts: Sequence[int] | None,
    choice: dict[str, Any],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, int]:
    """out, lse and the number of keys read, one query and head at a time; in `dtype`, softmax in float32 at least."""
    batch, heads, m, _ = q.shape
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.zeros(q.shape, dtype=dtype), torch.full((batch, heads, m), -torch.inf, dtype=wide)
    group, read = heads // store.order.shape[1], 0
    for row, codes in enumerate(store_codes(store)):
        keys, values = (x.to(dtype) for x in codes.values())
        for column in range(m):
            place = keys.shape[1] - m + column
            if place < 0 or column < (0 if starts is None else starts[row]):
                continue
            loaded: set[tuple[int, int]] = set()
            for head in range(heads):
                kv = head // group
                bucket = [] if index is None else index[row, kv].tolist()
                chooser = head if visited is not None and visited.shape[1] == heads else kv
                seen = [] if visited is None else visited[row, chooser, column].tolist()
                sink, window = choice["sink_tokens"], choice["window_tokens"]
                kept = kept_keys(place, bucket, seen, sink, window, choice.get("meetings", 1))
                loaded |= {(kv, t) for t in kept}
                score = (keys[kv, kept] @ q[row, head, column].cpu().to(dtype)).to(wide) * choice["scaling"]
                if choice.get("softcap"):
                    score = choice["softcap"] * torch.tanh(score / choice["softcap"])
                if choice.get("sinks") is not None:
                    score = torch.cat((score, choice["sinks"][head : head + 1].cpu().to(wide)))
                p = score.softmax(0)[: len(kept)].to(dtype)
                out[row, head, column] = p @ values[kv, kept]
                lse[row, head, column] = score.logsumexp(0)
            read += len(loaded)
    return out, lse, read


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_ragged_rows(share: float, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    store = sparse_store([130, 1, 64, 63, 65], 2, 64, device)
    index, visited = random_index(store, 1, 9, share)
    check_sparse(tokens(5, 8, 1, 64, dtype=dtype, device=device), store, index, visited, backend)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [16, 80, 128])
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
        {"sink_tokens": 1 << 31, "window_tokens": 1 << 40},
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


def test_the_dense_part_alone(device: torch.device, backend: str) -> None:
    store = sparse_store([150, 40], 2, 32, device)
    check_sparse(tokens(2, 4, 1, 32, device=device), store, None, None, backend)


def test_one_row_of_one_kv_head(device: torch.device, backend: str) -> None:
    """A launch whose numbers are 1, for which Triton compiles another kernel."""
    store = sparse_store([300], 1, 32, device)
    index, visited = random_index(store, 1, 9, 0.3)
    check_sparse(tokens(1, 4, 1, 32, device=device), store, index, visited, backend)


def test_a_store_of_open_tokens_only(device: torch.device, backend: str) -> None:
    store = sparse_store([5, 17], 2, 32, device)
    index, visited = random_index(store, 1, 4, 0.5)
    check_sparse(tokens(2, 4, 1, 32, device=device), store, index, visited, backend, window_tokens=2)


@pytest.mark.parametrize(
    ("ctas", "blocks", "scan"), [(3, 1, 2), (7, 2, 4), (16, 1, 1), (50, 4, 2), (1, 2, 8), (200, 1, 16)]
)
def test_many_shares(ctas: int, blocks: int, scan: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("turbo_hf.ops.launch_sparse")
    decode_launch = pytest.importorskip("turbo_hf.ops.launch_decode")
    monkeypatch.setattr(launch, "SCAN", scan)
    monkeypatch.setattr(gpu, "sms", lambda device: ctas)
    monkeypatch.setattr(decode_launch, "decode_tiles", lambda *args, **options: DecodeTiles(blocks, 1, 2))
    launch._workspace.cache_clear()
    store = sparse_store([350, 3, 290], 2, 32, device, block=32)
    index, visited = random_index(store, 2, 9, 0.3)
    q = tokens(3, 4, 2, 32, device=device)
    for _ in range(2):  # counters are zeros again
        check_sparse(q, store, index, visited, "triton", starts=[0, 1, 0])
    launch._workspace.cache_clear()


@pytest.mark.parametrize("buckets", [3, 30, 60])
@pytest.mark.parametrize("share", [0.01, 0.2])
def test_blocks_without_a_visited_bucket_are_not_read(share: float, buckets: int, device: torch.device) -> None:
    pytest.importorskip("triton")
    store = sparse_store([400], 2, 32, device, block=32)
    _, visited = random_index(store, 2, buckets, share)
    index = torch.randint(0, buckets, (1, 2, 1, 400), device=device).sort(-1).values.to(torch.int16)
    q = tokens(1, 4, 2, 32, device=device)
    got = check_sparse(q, store, index, visited, "triton")
    # what no query reads may hold anything
    blocks = index[0, :, 0, :384].unflatten(-1, (12, 32)).long()
    asked = visited[0].any(1).any(1).gather(-1, blocks.flatten(1)).view_as(blocks).any(-1).any(0)
    # first and newest tokens, and the block of which nothing is known
    asked[[0, 6, 11]] = True
    assert bool((blocks[..., -1] - blocks[..., 0] < 8).all()), "blocks so wide are read without a look"
    assert share > 0.1 or not bool(asked.all())
    for pages in store.heads:
        pages.scale[store.table[0, ~asked]] = torch.nan
    options = CHOICE | {"spans": spans_of(store, index), "mode": "fp16"}
    again = sparse_decode(q, store, index, visited, **options, backend="triton")
    assert torch.equal(again.out, got.out)


@pytest.mark.parametrize("groups", [((4, 2),), ((4, 1), (2, 1)), ((8, 2),)], ids=str)
@pytest.mark.parametrize("threshold", [None, -6.0])
def test_on_quantized_values(
    threshold: float | None, groups: tuple[tuple[int, int], ...], device: torch.device, backend: str
) -> None:
    """Mode "turbo": INT8 queries over INT8 codes of the kept keys, P in INT8, whose steps are all that is missed."""
    store = sparse_store([300, 70, 20], 2, 64, device, groups=groups)
    index, visited = random_index(store, 2, 9, 0.3)
    q = tokens(3, 8, 2, 64, device=device)
    options: dict[str, Any] = {"sas_threshold": threshold, "spans": spans_of(store, index), "backend": backend}
    got = sparse_decode(q, store, index, visited, scaling=0.05, sink_tokens=1, window_tokens=20, **options)
    fake = int8_queries(q, [0] * 3)
    for row, codes in enumerate(store_codes(store)):
        for head, column in ((0, 0), (1, 0), (0, 1), (1, 1)):
            buckets, seen = index[row, head].tolist(), visited[row, head, column].tolist()
            kept = kept_keys(codes.k.shape[1] - 2 + column, buckets, seen, 1, 20, 1)
            k, k_scale, v, v_scale = (x[head : head + 1, kept] for x in codes[:4])
            own = Codes(k, k_scale, v, v_scale, codes.tile[kept])
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


def test_launches_that_are_replayed_keep_their_workspace(device: torch.device) -> None:
    launch = pytest.importorskip("turbo_hf.ops.launch_sparse")
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


def test_several_tables(device: torch.device) -> None:
    store = sparse_store([150, 40], 2, 32, device)
    index, visited = random_index(store, 2, 9, 0.3, tables=4)
    check_sparse(tokens(2, 4, 2, 32, device=device), store, index, visited, "auto", meetings=2)


@pytest.mark.parametrize("tables", [1, 4])
def test_each_query_head_has_buckets_of_its_own(tables: int, device: torch.device) -> None:
    store = sparse_store([170, 63, 2], 2, 32, device, groups=((4, 1), (2, 1)))
    index, visited = random_index(store, 2, 9, 0.3, tables, query_heads=6)
    q = tokens(3, 6, 2, 32, device=device)
    how: dict[str, Any] = {"meetings": min(2, tables)}
    check_sparse(q, store, index, visited, "auto", starts=[0, 1, 0], sinks=True, **how)
    # the heads of a KV head with the same visits, in INT8: what one choice for all of them gives
    shared = visited[:, ::3]
    want, got = (
        sparse_decode(q, store, index, each, **CHOICE, mode="turbo", backend="reference", **how)
        for each in (shared, shared.repeat_interleave(3, 1))
    )
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_queries_do_not_depend_on_each_other(device: torch.device, backend: str) -> None:
    store = sparse_store([150], 2, 32, device)
    index, visited = random_index(store, 3, 9, 0.3)
    q = tokens(1, 4, 3, 32, device=device)
    whole = sparse_decode(q, store, index, visited, **CHOICE, backend=backend)
    other = q.clone()
    other[:, :, 1:] = 7.0
    again = sparse_decode(other, store, index, visited.roll(1, 2) | visited, **CHOICE, backend=backend)
    alone = sparse_decode(q, store, index, visited, **CHOICE, backend=backend)
    assert torch.equal(whole.out, alone.out)
    assert again.out[:, :, 0].isfinite().all()
    only = visited.clone()
    only[:, :, 1:] = True
    again = sparse_decode(other, store, index, only, **CHOICE, backend=backend)
    assert torch.equal(again.out[:, :, 0], whole.out[:, :, 0])


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
        ({"visited": None}, "buckets and visited belong together"),
        ({"sink_tokens": -1}, "sink_tokens must be at least 0 and window_tokens at least 1; got -1 and 20"),
        ({"window_tokens": 0}, "sink_tokens must be at least 0 and window_tokens at least 1; got 1 and 0"),
        ({"meetings": 2}, "meetings from 1 to L; got"),
        ({"visited": torch.zeros(1, 2, 2, 1, 4, dtype=torch.bool)}, r"visited \[1, 2 or 4, 1, L, C\]"),
        ({"visited": torch.zeros(1, 3, 1, 1, 4, dtype=torch.bool)}, r"got .*\(1, 3, 1, 1, 4\) and 1"),
        ({"q": torch.zeros(2, 4, 1, 32)}, "q has 2 rows on cpu; the cache holds 1 on cpu"),
        ({"softcap": -1.0}, "softcap must be above 0"),
        (
            {"spans": torch.zeros(1, 1, 3, 2, dtype=torch.int16)},
            r"spans must be torch.int16 \[1, 2, n, 2\]; got .* \[1, 1, 3, 2\]",
        ),
        ({"spans": torch.zeros(1, 2, 3, 2)}, "spans must be torch.int16 .* got torch.float32"),
        ({"buckets": torch.zeros(1, 2, 1, 100, dtype=torch.int64)}, "buckets must be torch.int16 .* got torch.int64"),
        (
            {"buckets": torch.zeros(1, 2, 1, 63, dtype=torch.int16)},
            "with cap >= 64, the tokens sealed in the longest row, .* got torch.int16 with cap 63",
        ),
        ({"visited": torch.zeros(1, 2, 1, 1, 4)}, "visited torch.bool; got .* and torch.float32"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
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
    with pytest.raises(ValueError, match=r"store.open_len must be \[B\] = \[1\]; got \(3,\)"):
        sparse_decode(torch.zeros(1, 4, 1, 32), store, index, visited, **CHOICE)


def test_the_kernel_says_what_it_does_not_take() -> None:
    store = sparse_store([100], 2, 32, torch.device("cpu"))
    q = torch.zeros(1, 4, 1, 32)
    index, visited = random_index(store, 1, 4, 0.5, tables=3)
    with pytest.raises(ValueError, match="several hash tables have no kernel"):
        sparse_decode(q, store, index, visited, **CHOICE, backend="triton")
    index, visited = random_index(store, 1, 4, 0.5, query_heads=4)
    with pytest.raises(ValueError, match="visits of each query head have no kernel"):
        sparse_decode(q, store, index, visited, **CHOICE, backend="triton")
    with pytest.raises(ValueError, match="9000 buckets are more than the 8192 of visits by mass"):
        visit(torch.zeros(1, 1, 1, 1, 9000), mass=0.1, backend="triton")
    with pytest.raises(ValueError, match="float64 has no kernel"):
        visit(torch.zeros(1, 1, 1, 1, 9, dtype=torch.float64), probes=1, backend="triton")
