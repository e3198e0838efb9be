"""What launches give to the kernels that store tokens."""

from typing import Any, NamedTuple


class NewTokens(NamedTuple):
    """Keys and values [B, Hkv, M, D] with their strides."""

    k: Any
    v: Any
    k_strides: Any
    v_strides: Any


class NewQueries(NamedTuple):
    """Queries that are balanced on the way.

    data: [B, Hq, M, D]. strides: its strides. out: where they go, contiguous.
    heads, tokens, rows: Hq, M, and B Hq M.
    """

    data: Any
    strides: Any
    out: Any
    heads: Any
    tokens: Any
    rows: Any


class StoreForm(NamedTuple):
    """What kernels that seal are compiled for.

    slots, bits, value_bits: for each width, its KV heads, and the bits of their keys and values.
    heads: KV heads.
    dim, padded_dim: channels per head, and per tile.
    block: tokens per block.
    first, recent: open tokens before and behind those that are sealed (`KVStore`).
    """

    slots: tuple[int, ...]
    bits: tuple[int, ...]
    value_bits: tuple[int, ...]
    heads: int
    dim: int
    padded_dim: int
    block: int
    first: int
    recent: int
