"""Kernels that move what is stored: open tokens between slots and blocks, and rows in place."""

import triton
import triton.language as tl


@triton.jit
def exchange_open_kernel(
    blocks,  # (k [N, H, b, D], v [N, H, V, b], k_scale [N, H, b], v_scale [N, H, b])
    slots,  # the same, with `room` in place of b
    slot_ptr, first_ptr, last_ptr, held_ptr,  # int64 [R]
    room,
    HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Each program moves PART channels of the tokens of one request and head; the first of them the scales.

    AT: the place in a slot where the tokens begin.
    """
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first = tl.load(first_ptr + request)
    last = tl.load(last_ptr + request)
    held = tl.load(held_ptr + request)
    of_first, of_last = first * HEADS + head, last * HEADS + head
    of_slot = tl.load(slot_ptr + request) * HEADS + head
    n, d = tl.arange(0, PADDED), tl.program_id(1) * PART + tl.arange(0, PART)
    before = n < held
    # what the slot holds already stays there, if the first block is the last one
    taken = (n < BLOCK) & (n >= tl.where(first == last, held, 0))
    k_block, v_block, ks_block, vs_block = blocks
    k_slot, v_slot, ks_slot, vs_slot = slots
    in_k, in_v = n[:, None] * D + d[None, :], d[:, None] * BLOCK + n[None, :]
    # of the request's slot
    k_slot += of_slot * room * D + AT * D
    v_slot += of_slot * room * V + AT
    ks_slot += of_slot * room + AT
    vs_slot += of_slot * room + AT
    in_v_slot = d[:, None] * room + n[None, :]
    k_before, v_before = before[:, None] & (d < D)[None, :], (d < V)[:, None] & before[None, :]
    k_taken, v_taken = taken[:, None] & (d < D)[None, :], (d < V)[:, None] & taken[None, :]
    # the scales of no token, but for the first program
    ends = tl.where(tl.program_id(1) == 0, PADDED, 0)
    scale_before, scale_taken = before & (n < ends), taken & (n < ends)
    k = tl.load(k_slot + in_k, mask=k_before, other=0)
    v = tl.load(v_slot + in_v_slot, mask=v_before, other=0)
    ks = tl.load(ks_slot + n, mask=scale_before, other=0.0)
    vs = tl.load(vs_slot + n, mask=scale_before, other=0.0)
    k_new = tl.load(k_block + of_last * BLOCK * D + in_k, mask=k_taken, other=0)
    v_new = tl.load(v_block + of_last * BLOCK * V + in_v, mask=v_taken, other=0)
    ks_new = tl.load(ks_block + of_last * BLOCK + n, mask=scale_taken, other=0.0)
    vs_new = tl.load(vs_block + of_last * BLOCK + n, mask=scale_taken, other=0.0)
    # all of it is read before any is overwritten
    tl.debug_barrier()
    tl.store(k_block + of_first * BLOCK * D + in_k, k, mask=k_before)
    tl.store(v_block + of_first * BLOCK * V + in_v, v, mask=v_before)
    tl.store(ks_block + of_first * BLOCK + n, ks, mask=scale_before)
    tl.store(vs_block + of_first * BLOCK + n, vs, mask=scale_before)
    tl.store(k_slot + in_k, k_new, mask=k_taken)
    tl.store(v_slot + in_v_slot, v_new, mask=v_taken)
    tl.store(ks_slot + n, ks_new, mask=scale_taken)
    tl.store(vs_slot + n, vs_new, mask=scale_taken)


@triton.jit
def select_rows_kernel(
    tensors_ptr,  # int64 [T, 2]: the address of each tensor, and the int32 words of its rows
    rows_ptr,  # int64 [B]
    ROWS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Row i of every tensor becomes what its row `rows[i]` was. A program moves the same WORDS words of all rows."""
    tensor = tl.program_id(1)
    base = tl.load(tensors_ptr + 2 * tensor).to(tl.pointer_type(tl.int32))
    words = tl.load(tensors_ptr + 2 * tensor + 1)
    row = tl.arange(0, PADDED)
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    live = (row < ROWS)[:, None] & (at < words)[None]
    source = tl.load(rows_ptr + row, row < ROWS, other=0)
    moved = tl.load(base + source[:, None] * words + at[None], live, other=0)
    # all words are read before any is overwritten
    tl.debug_barrier()
    tl.store(base + row[:, None] * words + at[None], moved, live)
