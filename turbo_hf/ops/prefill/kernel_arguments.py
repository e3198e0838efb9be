"""What launches give to `prefill_kernel`, by what belongs together."""

from typing import Any, NamedTuple


class View(NamedTuple):
    """A tensor [B, H, M, D] whose channels lie side by side. strides: those of the first three dimensions."""

    data: Any
    strides: Any


class Chunk(NamedTuple):
    """Keys and values of the chunk.

    k, v: in the model's own dtype; None where they are quantized.
    k_scale, v_scale: scales of the quantized ones, those of V as log2.
    starts: int64 [B], each row's first token; None: 0.
    padded: tokens of the quantized operands.
    """

    k: View | None
    v: View | None
    k_scale: Any
    v_scale: Any
    starts: Any
    padded: int


class Past(NamedTuple):
    """The past as the kernel reads it.

    k, v, scale: sealed blocks, as `unpack_past` or `unpack_tiles` makes them.
    sealed: sealed blocks per row.
    k_open, v_open, k_open_scale, v_open_scale, open_len: the open tokens, as in `KVStore`.
    sealed_room, open_room: capacity in tokens of `k`, and of `k_open`.
    """

    k: Any
    v: Any
    scale: Any
    sealed: Any
    k_open: Any
    v_open: Any
    k_open_scale: Any
    v_open_scale: Any
    open_len: Any
    sealed_room: int
    open_room: int


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


class PrefillResult(NamedTuple):
    """Where results go: out [B, Hq, M, D], lse float32 [B, Hq, M], broken as `prefill_kernel` has it."""

    out: View
    lse: Any
    broken: Any


class PrefillForm(NamedTuple):
    """What the kernel is compiled for.

    heads, group: query heads, and those per KV head.
    dim, padded_dim: channels per head, and per tile.
    block_m, block: queries and keys per tile.
    past_block: tokens per sealed block.
    past_tile: tokens of the past per tile; fewer than `past_block` only where P has no scale per tile.
    window: tokens that a query sees; 0: all.
    p_type, p_log2: type of P, and log2 of its largest value in a tile.
    k_token: whether keys have a scale per token.
    split: whether several programs share the past of a tile of queries.
    in_time: whether sealed values are in the order of time, not in VALUE_ORDER.
    """

    heads: int
    group: int
    dim: int
    padded_dim: int
    block_m: int
    block: int
    past_block: int
    past_tile: int
    window: int
    p_type: Any
    p_log2: float
    k_token: bool
    split: bool
    in_time: bool
