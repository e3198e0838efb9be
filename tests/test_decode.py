"""`decode` against the float64 oracle over the very integers that the cache holds."""

from itertools import permutations
from typing import Any

import pytest
import torch
from all_pairs import all_pairs
from budgets import largest
from choices import BACKENDS, FLOATS, OPTIONS, TWO_MODES
from decode_support import check_decode
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import decode
from stores import make_store, random_store, tokens

from turbo_hf.layout import BITS, HeadGroups

pytestmark = pytest.mark.usefixtures("poison")

EVERY = (*BITS, *permutations(BITS, 2))
"""Each width that codes have."""
NOTHING = [pytest.param(size, id=f"{size:g}") for size in (0.0, 1e-30, 1e-37, 1e-43)]
RAGGED = [130, 1, 64, 63, 65]


@all_pairs(
    heads=[
        pytest.param((2, 2), id="gqa1:1"),
        pytest.param((8, 2), id="gqa4:1"),
        pytest.param((14, 2), id="gqa7:1"),
        pytest.param((4, 1), id="mqa"),
    ],
    mode=TWO_MODES,
    backend=BACKENDS,
)
def test_head_groups(heads: tuple[int, int], mode: str, device: torch.device, backend: str) -> None:
    query_heads, kv_heads = heads
    store = random_store(RAGGED, kv_heads, 64, device)
    check_decode(tokens(5, query_heads, 1, 64, device=device), store, mode, backend)


@all_pairs(
    dim=[pytest.param(d, id=f"d{d}") for d in (16, 48, 64, 80, 96, 128)],
    bits=[pytest.param(bits, id=f"{bits}bit") for bits in BITS],
    mode=TWO_MODES,
)
def test_head_dims_and_bits(dim: int, bits: int, mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 63], 2, dim, device, groups=((bits, 2),))
    check_decode(tokens(2, 4, 2, dim, device=device), store, mode, backend, starts=[0, 1])


@all_pairs(
    length=[pytest.param(n, id=f"n{n}") for n in (1, 63, 64, 65, 127, 128, 130)], mode=TWO_MODES, backend=BACKENDS
)
def test_lengths(length: int, mode: str, device: torch.device, backend: str) -> None:
    check_decode(tokens(1, 4, 1, 64, device=device), random_store([length], 1, 64, device), mode, backend)


@all_pairs(m=[pytest.param(m, id=f"m{m}") for m in (1, 2, 5, 16)], mode=TWO_MODES, backend=BACKENDS)
def test_several_tokens(m: int, mode: str, device: torch.device, backend: str) -> None:
    """Drafts: the last m tokens see only what stands before them, across a block's edge too."""
    store = random_store([130, 16, 64, 70], 2, 64, device)
    check_decode(tokens(4, 4, m, 64, device=device), store, mode, backend)


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: dict[str, Any], mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 4, 64, 63, 65], 2, 64, device, groups=((4, 1), (2, 1)))
    check_decode(tokens(5, 4, 3, 64, device=device), store, mode, backend, **options)


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
        for backend in ("reference", "triton")
        for dtype in FLOATS
        # it has no kernel
        if (backend, dtype) != ("triton", torch.float64)
    ],
)
def test_dtypes(backend: str, dtype: torch.dtype, mode: str, device: torch.device) -> None:
    store = random_store([130, 65], 2, 64, device, dtype=dtype)
    check_decode(tokens(2, 4, 2, 64, dtype=dtype, device=device), store, mode, backend, sinks=True)


@all_pairs(block=[pytest.param(b, id=f"b{b}") for b in (32, 64, 128)], mode=TWO_MODES, backend=BACKENDS)
def test_block_sizes_and_open_tokens_beyond_one(block: int, mode: str, device: torch.device, backend: str) -> None:
    store = random_store([300, 140], 2, 64, device, block=block)
    check_decode(tokens(2, 4, 3, 64, device=device), store, mode, backend, window=150)
    # while tokens may still be taken back, whole blocks stay open
    store = random_store([300, 140], 2, 64, device, block=block, sealed=[0, 1])
    check_decode(tokens(2, 4, 3, 64, device=device), store, mode, backend, window=150)


@all_pairs(
    groups=[
        pytest.param(((4, 4),), id="4"),
        pytest.param(((4, 2), (2, 2)), id="4+2"),
        pytest.param(((8, 1), (3, 3)), id="8+3"),
        pytest.param(((8, 1), (4, 1), (3, 1), (2, 1)), id="8+4+3+2"),
        pytest.param((((4, 2), 2), ((8, 3), 1), ((3, 2), 1)), id="4/2+8/3+3/2"),
        pytest.param((((2, 8), 1), ((2, 3), 1), ((3, 4), 2)), id="2/8+2/3+3/4"),
    ],
    mode=TWO_MODES,
    backend=BACKENDS,
)
def test_heads_of_any_width_in_any_order(groups: HeadGroups, mode: str, device: torch.device, backend: str) -> None:
    order = torch.stack([torch.randperm(4) for _ in range(3)])
    store = random_store([130, 64, 90], 4, 64, device, groups=groups, order=order)
    check_decode(tokens(3, 8, 2, 64, device=device), store, mode, backend)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_padding_is_neither_read_nor_written(mode: str, device: torch.device, backend: str) -> None:
    """Rows that bring fewer tokens than others, one that brings none, one that holds none at all."""
    q, starts = tokens(4, 4, 5, 64, device=device), [0, 3, 5, 5]
    for row, start in enumerate(starts):
        q[row, :, :start] = torch.nan
    got = check_decode(q, random_store([130, 2, 70, 0], 2, 64, device), mode, backend, starts=starts, sinks=True)
    assert bool(got.lse[2:].isneginf().all())
    assert not got.out[2:].any()


@pytest.mark.parametrize("mode", TWO_MODES)
def test_strides_of_q_do_not_matter(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 65], 2, 64, device)
    q = tokens(2, 3, 4, 64, device=device).transpose(1, 2)
    got = check_decode(q, store, mode, backend)
    for a, b in zip(got, decode(q.contiguous(), store, scaling=0.125, mode=mode, backend=backend), strict=True):
        assert torch.equal(a, b)


@all_pairs(
    size=[pytest.param(size, id=f"scores{size:g}") for size in (0.0, 1e-6, 1e3, 1e6)], mode=TWO_MODES, backend=BACKENDS
)
def test_scores_of_any_size(size: float, mode: str, device: torch.device, backend: str) -> None:
    """One key takes all of P, or all keys the same share, without a NaN and with lse as large as the scores."""
    store = random_store([130, 65], 2, 64, device)
    q = tokens(2, 4, 2, 64, device=device)
    check_decode(size * q, store, mode, backend, scaling=1.0, sinks=torch.zeros(4, device=device))
    check_decode(size * q, store, mode, backend, scaling=1.0)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_sink_above_all_scores_takes_all(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([70], 2, 64, device)
    got = check_decode(
        tokens(1, 2, 1, 64, device=device), store, mode, backend, sinks=torch.full((2,), 200.0, device=device)
    )
    assert bool((got.lse == 200).all())
    assert largest(got.out) < torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("size", NOTHING)
def test_blocks_of_zeros(size: float, mode: str, device: torch.device, backend: str) -> None:
    """Scales of 0 must not divide anything; numbers of which a scale has no finite reciprocal count as 0."""
    k, v = tokens(1, 2, 150, 16, device=device), tokens(1, 2, 150, 16, device=device)
    for part in (k[:, :, :64], v[:, :, 64:128], k[:, :, 140:], v[:, :, 130:]):
        part.mul_(size)
    q = tokens(1, 4, 3, 16, device=device)
    check_decode(q, make_store(k, v, [150]), mode, backend)
    check_decode(size * q, make_store(k, v, [150]), mode, backend)
    check_decode(q, make_store(size * k, size * v, [150]), mode, backend)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_token_of_zeros_takes_almost_all(mode: str, device: torch.device, backend: str) -> None:
    """What is left for the others is too little to be divided by."""
    k, v, q = (tokens(1, 1, n, 16, device=device) for n in (70, 70, 1))
    k[:, :, 5], v[:, :, 5] = q[:, :, 0] * (88 / q.square().sum()), 0
    k = k - (k * q).sum(-1, keepdim=True) * q / q.square().sum() * (torch.arange(70, device=device) != 5)[:, None]
    check_decode(q, make_store(k, v, [70]), mode, backend, scaling=1.0)


@settings(max_examples=150)
@given(data=st.data())
def test_any_decode(data: st.DataObject) -> None:
    any_decode(data, "reference", torch.device("cpu"))


@settings(max_examples=16)
@given(data=st.data(), mode=st.sampled_from(("fp16", "turbo")))
def test_any_decode_by_the_kernel(data: st.DataObject, mode: str, device: torch.device) -> None:
    any_decode(data, "triton", device, (mode,))


def any_decode(
    data: st.DataObject, backend: str, device: torch.device, modes: tuple[str, ...] = ("fp16", "turbo")
) -> None:
    """Any shape, lengths, widths, options: right in all these modes."""
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.integers(1, 4), "group")
    block, dim = data.draw(st.sampled_from((32, 64)), "block"), data.draw(st.sampled_from((16, 32, 48)), "dim")
    m = data.draw(st.integers(1, 16), "m")
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3), "lengths")
    new = [data.draw(st.integers(0, min(m, n)), "new") for n in lengths]
    sealed = [data.draw(st.integers(0, n // block), "sealed") for n in lengths]
    low = data.draw(st.integers(0, kv_heads), "low")
    widths = (data.draw(st.sampled_from(EVERY)), data.draw(st.sampled_from(EVERY)))
    groups = tuple((bits, n) for bits, n in zip(widths, (kv_heads - low, low), strict=True) if n)
    order = torch.tensor([data.draw(st.permutations(range(kv_heads)), "order") for _ in lengths])
    options = {
        "window": data.draw(st.none() | st.integers(1, 160), "window"),
        "softcap": data.draw(st.none() | st.sampled_from((1.0, 30.0)), "softcap"),
        "sinks": data.draw(st.none() | st.just(True), "sinks"),
    }
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    store = random_store(lengths, kv_heads, dim, device, groups=groups, order=order, block=block, sealed=sealed)
    q = tokens(len(lengths), kv_heads * group, m, dim, device=device)
    for mode in modes:
        check_decode(q, store, mode, backend, starts=[m - n for n in new], **options)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_query_with_nan_gives_nan(mode: str, device: torch.device, backend: str) -> None:
    store, q = random_store([130, 70], 2, 64, device), tokens(2, 4, 1, 64, device=device)
    q[0, 1, 0, 3] = torch.nan
    got = decode(q, store, scaling=0.125, mode=mode, backend=backend)
    assert bool(got.out[0, 1].isnan().all())
    assert bool(got.out[1].isfinite().all())
    assert bool(got.out[0, 2:].isfinite().all())


def test_a_cache_without_a_token(backend: str) -> None:
    store = make_store(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16), [0, 0])
    got = decode(torch.randn(2, 4, 1, 16), store, scaling=0.25, sinks=torch.zeros(4), backend=backend)
    assert not got.out.any()
    assert bool(got.lse.isneginf().all())
