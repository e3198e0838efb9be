"""Offsets past 2^31 elements: the last rows of tensors that large are what they are alone. On GPUs with 40 GB free."""

import pytest
import torch
from gpu_support import NO_FP8, has_fp8
from op_calls import append_step, decode, prefill, quantize_tokens
from stores import make_store, tokens

from turbo_hf.layout import KVStore, PagedHeads, empty_pages

FREE = 40 << 30
"""Bytes that the largest of these tests takes."""


def enough() -> bool:
    return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= FREE


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not enough(), reason="needs a GPU with 40 GB free")]

ROWS, HEADS, TOKENS, DIM = 66, 256, 1024, 128
LIMIT = 2**31


def repeated(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, ...] again and again, [ROWS, ...], in memory of their own; n divides ROWS."""
    return rows.repeat(ROWS // len(rows), *[1] * (rows.dim() - 1))


@pytest.mark.parametrize(
    ("mode", "window"),
    [
        pytest.param("fp8", None, id="fp8-hopper"),
        pytest.param("turbo", 300, id="turbo"),
        pytest.param("int8", 300, id="int8"),
        pytest.param("native", 300, id="native"),
    ],
)
def test_prefill(mode: str, window: int | None) -> None:
    if mode == "fp8" and not has_fp8(torch.device("cuda")):
        pytest.skip(NO_FP8)
    q, k, v = (tokens(1, HEADS, TOKENS, DIM, dtype=torch.float16, device="cuda") for _ in range(3))
    want = prefill(q, k, v, scaling=0.1, window=window, mode=mode)
    q, k, v = (repeated(x) for x in (q, k, v))
    assert q.numel() > LIMIT
    got = prefill(q, k, v, scaling=0.1, window=window, mode=mode)
    for row in (0, 1, ROWS - 2, ROWS - 1):
        assert torch.equal(got.out[row], want.out[0])
        assert torch.equal(got.lse[row], want.lse[0])


def test_one_tensor() -> None:
    x = tokens(1, HEADS, TOKENS, DIM, dtype=torch.float16, device="cuda")
    for large, small in zip(quantize_tokens(repeated(x)), quantize_tokens(x), strict=True):
        assert torch.equal(large[-1], small[0])


def at_the_end(store: KVStore) -> KVStore:
    """The same cache in a pool so large that its pages lie past 2^31 elements."""
    (pages,) = store.paged
    used, slots = len(pages.k), pages.k.shape[1]
    more = LIMIT // pages.k[0].numel() + 1
    large: PagedHeads = empty_pages(pages.bits, more + used, slots, DIM, store.block, pages.k.device)
    for name in ("k", "v", "meta", "size"):
        getattr(large, name)[more:] = getattr(pages, name)
    return store._replace(paged=(large,), table=store.table + more)


def a_store(bits: int) -> KVStore:
    k, v = (tokens(2, 8, 500, DIM, dtype=torch.float16, device="cuda") for _ in range(2))
    # each row's last block is full and open, with a page of its own
    return make_store(k, v, [448, 128], groups=((bits, 8),), sealed=[6, 1])


@pytest.mark.parametrize("bits", [8, 4])
def test_decode_and_a_prompt_over_a_past(bits: int) -> None:
    store, q = a_store(bits), tokens(2, 32, 1, DIM, dtype=torch.float16, device="cuda")
    new = [tokens(2, heads, 40, DIM, dtype=torch.float16, device="cuda") for heads in (32, 8, 8)]
    large = at_the_end(store)
    assert large.paged[0].k.numel() > LIMIT
    for mode in ("turbo", "native"):
        got, want = (decode(q, past, scaling=0.1, mode=mode) for past in (large, store))
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)
        got, want = (prefill(*new, scaling=0.1, past=past, mode=mode) for past in (large, store))
        assert torch.equal(got.out, want.out)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_step_seals_to_the_last_pages(bits: int) -> None:
    k, v = (tokens(2, 8, 1, DIM, dtype=torch.float16, device="cuda") for _ in range(2))
    found = []
    for place in (lambda store: store, at_the_end):
        torch.manual_seed(1)
        store = a_store(bits)
        table = torch.nn.functional.pad(store.table, (0, 1))
        # the pool has a page in front of all others and one behind, of which no row knows
        table[0, 6], table[1, 1] = 0, len(store.paged[0].k) - 1
        store = place(store._replace(table=table))
        nonfinite, arrived = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (1, 2))
        append_step(k, v, store, nonfinite=nonfinite, arrived=arrived)
        own = [store.table[0, 6], store.table[1, 1]]
        found.append([getattr(store.paged[0], name)[page] for page in own for name in ("k", "v", "meta", "size")])
        assert store.sealed.tolist() == [7, 2]
    for large, small in zip(*found, strict=True):
        assert torch.equal(large, small)
