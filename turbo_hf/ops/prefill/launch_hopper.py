"""Launch of the prompt kernel for Hopper. Imported only where it runs, as it needs Triton 3.6 and its Gluon."""

import math
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from turbo_hf.layout import PROMPT_TILE as TILE
from turbo_hf.layout import AttentionOutput, Operands, Scoring
from turbo_hf.ops import gpu
from turbo_hf.ops.prefill.kernel_hopper import hopper_prefill_kernel

L2_BYTES = 24e6
"""K and V of the heads that run together: they should stay in the 50 MB of L2, along with streaming data."""

STAGES = {64: 8, 128: 5}
"""Tiles of K and V in flight, by head dim."""


class TiledPast(NamedTuple):
    """The past as the kernel for Hopper reads it, beside its codes (`unpack_tiles`).

    scale: float32 [B, Hkv, room/64, 2], of each block of 64 tokens: the scale of keys, log2 of that of values.
    sealed, open_len: int64 [B], sealed blocks of 64 tokens, and the tokens behind them.
    room: capacity in tokens, whole tiles of 128.
    """

    scale: Any
    sealed: Any
    open_len: Any
    room: int


def launch_hopper_prefill(
    q: torch.Tensor,
    chunk: Operands,
    v_log2: torch.Tensor | None,
    to: AttentionOutput,
    broken: torch.Tensor,
    scoring: Scoring,
    past: Any = None,
    parts: int = 1,
    starts: torch.Tensor | None = None,
) -> None:
    """Write out and lse of q over `chunk` to `to`, v_log2 being the log2 of `chunk.v_scale`. scoring: a plain one.

    past: the `Past` that `unpack_tiles` makes. parts: how many programs share the past of a tile of queries;
    `to` is then float32 [parts, B, Hq, M, D] and [parts, B, Hq, M], contiguous. starts: int64 [B], each row's first
    token. `broken` is set for heads with NaN or Inf in q, or scores too large for INT8.
    """
    out, lse = to
    batch, heads, tokens, dim = q.shape
    kv_heads, padded = chunk.k.shape[1:3]
    assert chunk.v is not None
    assert v_log2 is not None
    fp8 = chunk.v.dtype == torch.float8_e4m3fn
    group, items = heads // kv_heads, triton.cdiv(tokens, TILE) * batch * heads * parts
    room = 0 if past is None else past.sealed_room
    together = min(batch * heads, max(1, int(L2_BYTES // (2 * (room + padded) * dim))) * group)
    while batch * heads % together:
        together -= 1
    key_layout = gl.NVMMASharedLayout.get_default_for([TILE, dim], gl.int8)
    value_layout = gl.NVMMASharedLayout.get_default_for([dim, TILE], gl.int8)

    def described(k: torch.Tensor, v: torch.Tensor, size: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        keys = TensorDescriptor(k, [batch * kv_heads * size, dim], [dim, 1], [TILE, dim], key_layout)
        return keys, TensorDescriptor(v, [batch * kv_heads * dim, size], [size, 1], [dim, TILE], value_layout)

    of_past: tuple[TensorDescriptor | None, TensorDescriptor | None] = (None, None)
    tiled = None
    if past is not None:
        of_past, tiled = described(past.k, past.v, room), TiledPast(past.scale, past.sealed, past.open_len, room)
    hopper_prefill_kernel[(min(items, gpu.sms(q.device)),)](
        q, *described(chunk.k, chunk.v, padded), chunk.k_scale, v_log2, *of_past, broken, out, lse,
        *q.stride()[:3], out.stride(-4), out.stride(-2), out.stride(-3), tokens, padded, items,
        triton.cdiv(tokens, TILE), together, heads, group,
        tiled, parts if parts > 1 else None, starts, scoring.scaling * math.log2(math.e),
        D=dim, STAGES=STAGES[dim], FP8=fp8, LATE_PACK=dim == 64, num_warps=4,
    )  # fmt: skip
