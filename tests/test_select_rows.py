"""Rows of many tensors are permuted in place, in one launch."""

import pytest
import torch
from op_calls import select_rows
from torch import Tensor

from turbo_hf.ops.store.contract import MOST_ROWS


def some_tensors(rows: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, 2, 16, 6), dtype=torch.int8, generator=generator)
    order = torch.randint(0, 9, (rows, 3), generator=generator)
    long = torch.randn(rows, 2, 5000 // rows, generator=generator)
    return [x.to(device) for x in (codes, order, long, torch.randn(rows, 1, generator=generator))]


@pytest.mark.parametrize("rows", [1, 3, 4, 37])
def test_each_row_becomes_the_named_one(rows: int, backend: str, device: torch.device) -> None:
    tensors = some_tensors(rows, device)
    before, places = [x.clone() for x in tensors], [x.data_ptr() for x in tensors]
    for turn in range(3):
        order = torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(turn)).tolist()
        select_rows(tensors, order, backend=backend)
        before = [x[order] for x in before]
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    assert [x.data_ptr() for x in tensors] == places


def test_what_the_kernel_does_not_serve() -> None:
    odd, many = torch.arange(6, dtype=torch.int8).view(2, 3), torch.arange(MOST_ROWS + 1)
    select_rows([odd], [1, 1])
    assert odd.tolist() == [[3, 4, 5]] * 2
    select_rows([many], list(range(MOST_ROWS, -1, -1)))
    assert many[0] == MOST_ROWS
    with pytest.raises(ValueError, match=r"contiguous on cpu with 2 rows; got \[3, 2\] on cpu"):
        select_rows([odd, odd.mT], [1, 1])
    select_rows([], [0])
