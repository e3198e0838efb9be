"""Shares of sparse decode: every unit of every output goes to one CTA, and each knows with how many it shares."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
tl = triton.language
shares = pytest.importorskip("turbo_hf.kernels.shares")


@triton.jit
def walk_kernel(costs_ptr, bounds_ptr, sharers_ptr, outputs, ctas, total, slack):  # type: ignore[no-untyped-def]
    """What each CTA takes of each output, [ctas, outputs, 2], and who shares it, [outputs, 2]."""
    origin = ctas * 0
    for output in range(outputs):
        cost = tl.load(costs_ptr + output)
        for cta in range(ctas):
            begin, left, share, longer, allowed = shares.share_of(cta + origin * 0, ctas, total, 1, slack)
            end = tl.minimum(begin + left - origin, cost)
            begin = tl.maximum(begin - origin, 0)
            at = bounds_ptr + 2 * (cta * outputs + output)
            if begin < end:
                tl.store(at, shares.snapped(begin, cost, allowed))
                tl.store(at + 1, shares.snapped(end, cost, allowed))
        _, _, share, longer, allowed = shares.share_of(origin * 0, ctas, total, 1, slack)
        first, count = shares.sharers(origin, cost, share, longer, allowed)
        tl.store(sharers_ptr + 2 * output, first)
        tl.store(sharers_ptr + 2 * output + 1, count)
        origin += cost


@triton.jit
def part_kernel(parts_ptr, whole, of):  # type: ignore[no-untyped-def]
    for x in range(of + 1):
        tl.store(parts_ptr + x, shares.part_of(x + of * 0, whole, of))


def walk(costs: list[int], ctas: int, slack: int, device: torch.device) -> tuple[torch.Tensor, list[list[int]]]:
    bounds = torch.zeros(ctas, len(costs), 2, dtype=torch.int32, device=device)
    sharers = torch.zeros(len(costs), 2, dtype=torch.int32, device=device)
    given = torch.tensor(costs, dtype=torch.int32, device=device)
    walk_kernel[(1,)](given, bounds, sharers, len(costs), ctas, sum(costs), slack)
    return bounds.cpu(), sharers.tolist()


def check_walk(costs: list[int], ctas: int, slack: int, device: torch.device) -> None:
    bounds, sharers = walk(costs, ctas, slack, device)
    share = sum(costs) // ctas
    for output, (cost, (first, count)) in enumerate(zip(costs, sharers, strict=True)):
        taken = [(cta, *pair) for cta, pair in enumerate(bounds[:, output].tolist()) if pair[0] < pair[1]]
        assert [begin for _, begin, _ in taken] == [0, *(end for _, _, end in taken[:-1])]
        assert taken[-1][2] == cost
        assert [cta for cta, _, _ in taken] == list(range(first, first + count))
        # a part that is not worth a merge goes to the neighbour
        least = min(min((share - 1) // 2, slack) + 1, cost)
        assert all(end - begin >= least for _, begin, end in (taken[0], taken[-1]))


@pytest.mark.parametrize(("costs", "ctas"), [([10081] * 8, 256), ([10081] * 10, 264), ([1, 1, 500, 1], 7), ([64], 64)])
@pytest.mark.parametrize("slack", [0, 5, 96])
def test_every_unit_goes_to_one_cta(costs: list[int], ctas: int, slack: int, device: torch.device) -> None:
    check_walk(costs, ctas, slack, device)


@given(costs=st.lists(st.integers(1, 60), min_size=1, max_size=6), ctas=st.integers(1, 12), slack=st.integers(0, 40))
def test_whatever_outputs_cost(costs: list[int], ctas: int, slack: int) -> None:
    check_walk(costs, min(ctas, sum(costs)), slack, torch.device("cpu"))


@pytest.mark.parametrize(("whole", "of"), [(0, 9), (7, 9), (9, 9), (1000, 3), (12345, 678)])
def test_parts_grow_and_end_whole(whole: int, of: int, device: torch.device) -> None:
    parts = torch.zeros(of + 1, dtype=torch.int32, device=device)
    part_kernel[(1,)](parts, whole, of)
    found = parts.tolist()
    assert found[0] == 0
    assert found[-1] == whole
    assert found == sorted(found)
    assert max(abs(part - x * whole / of) for x, part in enumerate(found)) <= 1
