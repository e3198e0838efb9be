"""Where the bits lie: packing against the drawing in `turbo_hf.layout`, and the bytes that it promises."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stores import unpack

from turbo_hf.layout import BITS, BLOCK_SIZES, PagedHeads, empty_pages, half_merge, half_split, page_bytes, value_order


@given(bits=st.sampled_from((4, 3, 2)), n=st.integers(1, 24).map(lambda i: 16 * i), data=st.data())
def test_packing_of_any_codes(bits: int, n: int, data: st.DataObject) -> None:
    line = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=n, max_size=n)), dtype=torch.uint8)
    codes = torch.stack([line.roll(i) for i in range(16)])
    packed = half_split(codes, bits)
    assert torch.equal(half_merge(packed, bits), codes)
    # the tests' own reader, on which the oracle of compressed attention stands
    assert unpack(packed, bits).tolist() == codes.tolist()


@pytest.mark.parametrize("block", [pytest.param(b, id=f"b{b}") for b in BLOCK_SIZES])
def test_value_order_is_a_permutation_within_16_tokens(block: int, device: torch.device) -> None:
    order = value_order(block, device)
    assert order.device.type == device.type
    groups = order.reshape(-1, 16)
    for i, group in enumerate(groups.tolist()):
        assert sorted(group) == list(range(16 * i, 16 * i + 16))
    # a thread t of four holds tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of 16: they must stand side by side
    for t in range(4):
        assert groups[0, 4 * t : 4 * t + 4].tolist() == [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]


def nbytes(pages: PagedHeads) -> int:
    return sum(x.nbytes for x in (pages.k, pages.v, pages.meta, pages.size))


@pytest.mark.parametrize("bits", [pytest.param(b, id=f"{b}bit") for b in BITS])
def test_page_bytes_are_those_allocated(bits: int, device: torch.device) -> None:
    for dim, block, value_bits in product((16, 64, 80, 128), BLOCK_SIZES, BITS):
        pages = empty_pages((bits, value_bits), 3, 2, dim, block, device)
        assert nbytes(pages) == 6 * page_bytes(dim, (bits, value_bits), block)
        assert (pages.bits, pages.value_bits) == (bits, value_bits)
        assert pages.width == (bits if bits == value_bits else (bits, value_bits))
        assert pages.k.shape[:3] == (3, 2, block)
        assert pages.v.shape[:3] == (3, 2, dim)


@pytest.mark.parametrize(
    ("dim", "by"), [pytest.param(64, (3.56, 6.4), id="d64"), pytest.param(128, (3.66, 6.7), id="d128")]
)
def test_compression_is_what_the_algorithm_promises(dim: int, by: tuple[float, float]) -> None:
    half_precision = 2 * 2 * 64 * dim
    assert round(half_precision / page_bytes(dim, 4), 2) == by[0]
    assert round(half_precision / page_bytes(dim, 2), 1) == by[1]
    # half of the bits of values: as much as half of the heads at 2 bit
    assert 2 * page_bytes(dim, (4, 2)) == page_bytes(dim, 4) + page_bytes(dim, 2)
    assert page_bytes(128, (4, 2)) / 64 == 108
