"""Open tokens on their way between the slots of requests and rows of blocks that are stored."""

import torch

from turbo_hf.ops.backend import uses_triton
from turbo_hf.ops.gpu import why_no_kernels_on

Opened = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""k, v, k_scale and v_scale of open tokens, as in `turbo_hf.layout.KVStore`."""


def exchange_open(
    blocks: Opened,
    slots: Opened,
    slot: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    held: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Each request's first block begins with the tokens that its slot holds; then the slot holds its last block.

    Args:
        blocks: k [N, Hkv, b, D] and v [N, Hkv, Dv, b] of any types, float32 scales [N, Hkv, b]; contiguous. The first
            `held` tokens of each request's first block change.
        slots: the same of S slots, with room for b tokens at least. Those of the requests change.
        slot, first, last: int64 [R], of each request its slot, and its first and last row among `blocks`. Requests
            without tokens may share a slot and a row.
        held: int64 [R], the tokens that the slot holds: b - 1 at most.
        backend: "auto", "triton" or "reference".

    Returns:
        None.

    Raises:
        ValueError: shapes that do not agree, or a backend that cannot run.
    """
    heads, block, dim = blocks[0].shape[1:]
    channels, room = blocks[1].shape[2], slots[0].shape[2]
    types = [x.dtype for x in blocks]
    for opened, tokens in ((blocks, block), (slots, room)):
        count = len(opened[0])
        wanted = [(count, heads, tokens, dim), (count, heads, channels, tokens), *[(count, heads, tokens)] * 2]
        found = [tuple(x.shape) for x in opened]
        alike = [x.dtype for x in opened] == types and all(x.is_contiguous() for x in opened)
        if found != wanted or room < block or not alike:
            raise ValueError(
                f"open tokens must be {wanted}, contiguous, of the types {types}, {block} of them at least; got "
                f"{found} of {[x.dtype for x in opened]}."
            )
    if {x.shape for x in (slot, first, last, held)} != {slot.shape}:
        raise ValueError(f"slot, first, last and held must have an entry per request; got {len(slot)} slots.")
    if uses_triton(backend, slot.device, why_no_kernels_on(slot.device)):
        from turbo_hf.ops.store.launch import launch_exchange_open  # noqa: PLC0415 - needs Triton

        launch_exchange_open(blocks, slots, slot, first, last, held)
        return
    here = torch.arange(block, device=slot.device) < held[:, None, None]
    for x, y, is_codes in zip(_tokens_last(blocks), _tokens_last(slots), (True, True, False, False), strict=True):
        before, new = y.index_select(0, slot)[..., :block], x.index_select(0, first)
        x.index_copy_(0, first, torch.where(here[:, :, None] if is_codes else here, before, new))
        y[..., :block].index_copy_(0, slot, x.index_select(0, last))


def _tokens_last(opened: Opened) -> Opened:
    """Their last dimension is then that of tokens."""
    k, v, k_scale, v_scale = opened
    return k.transpose(2, 3), v, k_scale, v_scale
