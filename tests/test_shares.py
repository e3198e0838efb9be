"""Shares of sparse decode: every tile of every output goes to one share, and no CTA has much more than another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
tl = triton.language
shares = pytest.importorskip("turbo_hf.ops.sparse.kernel_lists")


@triton.jit  # type: ignore[untyped-decorator]
def share_kernel(tiles_ptr, most_ptr, outputs, ctas, alone, PADDED: tl.constexpr):  # type: ignore
    o = tl.arange(0, PADDED)
    tiles = tl.load(tiles_ptr + o, mask=o < outputs, other=0)
    tl.store(most_ptr, shares.tiles_of_share(tiles, outputs, ctas, alone, 16, 8, 4))


def tiles_of_share(tiles: list[int], ctas: int, device: torch.device) -> int:
    most = torch.zeros(1, dtype=torch.int32, device=device)
    given = torch.tensor(tiles, dtype=torch.int32, device=device)
    share_kernel[(1,)](given, most, len(tiles), ctas, max(1, ctas // 2), PADDED=triton.next_power_of_2(len(tiles)))
    return int(most)


@triton.jit  # type: ignore[untyped-decorator]
def over_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):  # type: ignore
    i = tl.arange(0, N)
    tl.store(out_ptr + i, shares.over(tl.load(x_ptr + i), tl.load(y_ptr + i)))


def test_quotients_of_large_numbers_are_exact(device: torch.device) -> None:
    y = torch.cat((torch.arange(1, 513), torch.randint(1, 2**20, (512,)))).to(torch.int32)
    for shift in (-1, 0, 1):
        x = ((2**21 - 2) // 2 // y * y + shift).to(torch.int32)
        out = torch.zeros_like(x, device=device)
        over_kernel[(1,)](x.to(device), y.to(device), out, N=len(x))
        assert torch.equal(out.cpu(), -(-x // y))


def check(tiles: list[int], ctas: int, device: torch.device) -> None:
    most = tiles_of_share(tiles, ctas, device)
    count = sum(-(-n // most) for n in tiles)
    assert most >= 1
    # room for parts that the launcher keeps
    assert count <= 4 * ctas + len(tiles)
    if 2 * len(tiles) <= ctas:
        if sum(tiles) < 8 * ctas:
            ctas //= 2
        assert count <= ctas
        least = -(-sum(tiles) // ctas)
        while sum(-(-n // least) for n in tiles) > ctas:
            least += 1
        assert least <= most <= 1.1 * least
        rounds = -(-max(tiles) // least) // 16
        assert most == least or -(-max(tiles) // most) <= 16 * rounds
    else:
        # a CTA has at most one share more than others, and of one output
        longest = -(-count // ctas) * most
        assert longest <= sum(tiles) / ctas + most * (1 + len(tiles) / ctas)


@pytest.mark.parametrize(
    ("tiles", "ctas"),
    [([40] * 8, 264), ([2048] * 8, 264), ([1] * 512, 264), ([7] * 300, 264), ([1, 900, 3], 132), ([900], 132)],
)
def test_shares_of_usual_shapes(tiles: list[int], ctas: int, device: torch.device) -> None:
    check(tiles, ctas, device)


@given(tiles=st.lists(st.integers(1, 90), min_size=1, max_size=9), ctas=st.integers(1, 40))
def test_shares_of_any_costs(tiles: list[int], ctas: int) -> None:
    check(tiles, ctas, torch.device("cpu"))
