"""What launches give to `prefill_kernel`, by what belongs together."""

from typing import Any, NamedTuple


class View(NamedTuple):
    """A tensor [B, H, M, D] whose channels lie side by side. strides: those of the first three dimensions."""

    data: Any
    strides: Any


class Queries(NamedTuple):
    """Queries [B, Hq, M, D]. rotated: those for the chunk's keys, if these are rotated and the past's are not.

    bias: float32 [B, Hq, M], by which all scores of a row with the chunk's keys are raised, or None.
    """

    given: View
    rotated: View | None
    bias: Any


class Chunk(NamedTuple):
    """Keys and values of the chunk: the model's own, or None and the scales of quantized ones, those of V as log2.

    channel: float32 [B, Hkv, D], scales of V, or None. starts: int64 [B], each row's first token, or None: 0. padded:
    tokens of the quantized operands.
    """

    k: View | None
    v: View | None
    k_scale: Any
    v_scale: Any
    channel: Any
    starts: Any
    padded: int


class Past(NamedTuple):
    """What `unpack_past` returns, and the open tokens as in `KVStore`. slots, room: tokens that they have room for."""

    k: Any
    v: Any
    scale: Any
    sealed: Any
    k_open: Any
    v_open: Any
    k_open_scale: Any
    v_open_scale: Any
    open_len: Any
    slots: int
    room: int


class Result(NamedTuple):
    """Where results go: out [B, Hq, M, D], lse float32 [B, Hq, M], broken as `prefill_kernel` has it."""

    out: View
    lse: Any
    broken: Any


class Form(NamedTuple):
    """What the kernel is compiled for. heads: query heads; group: those of a KV head. dim, padded_dim: channels, and
    those of a tile.

    block_m, block: queries and keys of a tile. past_block: tokens of a sealed block; past_tile: those taken at a time,
    fewer only where P has no scale of its tile. window: 0 for none. p_type, p_log2: type of P, and log2 of its largest
    value in a tile. wide: type of the queries, where keys are not INT8. k_token: keys have a scale per token.
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
    causal: bool
    p_type: Any
    p_log2: float
    wide: Any
    k_token: bool
