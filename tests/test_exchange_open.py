"""Open tokens move between slots and the blocks of requests."""

import pytest
import torch
from op_calls import exchange_open

from turbo_hf.ops.store.contract import Opened

BLOCK, ROOM = 32, 48


def some_open(count: int, tokens: int, dims: tuple[int, int], device: torch.device) -> Opened:
    # latents, which are wider than their rotary parts, are in 16 bit
    dtype = torch.int8 if dims[0] == dims[1] else torch.float16
    codes = [
        torch.randint(-127, 128, shape).to(dtype)
        for shape in ((count, 2, tokens, dims[0]), (count, 2, dims[1], tokens))
    ]
    k, v, k_scale, v_scale = (x.to(device) for x in (*codes, *torch.rand(2, count, 2, tokens)))
    return k, v, k_scale.contiguous(), v_scale.contiguous()


@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (160, 32)])
def test_what_a_slot_holds_begins_the_first_block_and_the_last_one_stays(
    dims: tuple[int, int], backend: str, device: torch.device
) -> None:
    torch.manual_seed(dims[0])
    blocks, slots = some_open(7, BLOCK, dims, device), some_open(6, ROOM, dims, device)
    # one block each, several, nothing held, and two of no request that share a slot and a row
    requests = [(3, 0, 0, 5), (0, 1, 3, 31), (1, 4, 4, 0), (5, 6, 6, 0), (5, 6, 6, 0)]
    want_blocks, want_slots = (tuple(x.clone() for x in each) for each in (blocks, slots))
    for slot, first, last, held in requests:
        for x, y, at in zip(want_blocks, want_slots, (1, 2, 1, 1), strict=True):
            x[first].narrow(at, 0, held).copy_(y[slot].narrow(at, 0, held))
            y[slot].narrow(at, 0, BLOCK).copy_(x[last])
    index = (torch.tensor(x, device=device) for x in zip(*requests, strict=True))
    exchange_open(blocks, slots, *index, backend=backend)
    for got, want in ((blocks, want_blocks), (slots, want_slots)):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_what_does_not_agree_is_refused() -> None:
    cpu = torch.device("cpu")
    blocks, slots = some_open(2, BLOCK, (16, 16), cpu), some_open(2, ROOM, (16, 16), cpu)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="32 of them at least; got"):
        exchange_open(blocks, some_open(2, 16, (16, 16), cpu), one, one, one, one)
    with pytest.raises(ValueError, match="an entry per request; got 1 slots"):
        exchange_open(blocks, slots, one, one, one, torch.zeros(2, dtype=torch.int64))
