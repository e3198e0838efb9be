"""The kernel that permutes rows of many tensors in place, in one launch."""

import triton
import triton.language as tl


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
