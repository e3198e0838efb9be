"""Attention over kept keys by the kernel: how a launch is shared out, which blocks it never reads, and replays."""

from typing import Any

import pytest
import torch
from op_calls import sparse_decode
from sparse_attention_support import CHOICE, check_sparse, random_index, spans_of, sparse_store
from stores import tokens

from turbo_hf.ops import gpu
from turbo_hf.ops.tuning import DecodeTiles

pytestmark = pytest.mark.usefixtures("poison")


def test_one_row_of_one_kv_head(device: torch.device, backend: str) -> None:
    """A launch whose numbers are 1, for which Triton compiles another kernel."""
    store = sparse_store([300], 1, 32, device)
    index, visited = random_index(store, 1, 9, 0.3)
    check_sparse(tokens(1, 4, 1, 32, device=device), store, index, visited, backend)


@pytest.mark.parametrize(("ctas", "blocks", "scan"), [(3, 1, 2), (16, 2, 1), (50, 4, 4), (1, 2, 8), (90, 1, 16)])
def test_many_shares(ctas: int, blocks: int, scan: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("turbo_hf.ops.sparse.launch")
    decode_launch = pytest.importorskip("turbo_hf.ops.decode.launch")
    monkeypatch.setattr(launch, "SCAN", scan)
    monkeypatch.setattr(gpu, "sms", lambda device: ctas)
    monkeypatch.setattr(decode_launch, "decode_tiles", lambda *args, **options: DecodeTiles(blocks, 1, 2))
    launch._workspace.cache_clear()
    store = sparse_store([230, 3, 170], 2, 32, device, block=32)
    index, visited = random_index(store, 2, 9, 0.3)
    q, starts = tokens(3, 4, 2, 32, device=device), [0, 1, 0]
    got = check_sparse(q, store, index, visited, "triton", starts=starts)
    # counters are zeros again
    options = CHOICE | {"spans": spans_of(store, index), "mode": "fp16", "starts": torch.tensor(starts, device=device)}
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
    options = CHOICE | {"spans": spans_of(store, index), "mode": "fp16"}
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
