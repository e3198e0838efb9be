"""What launches give to the kernels that store tokens."""

from typing import Any, NamedTuple


class NewTokens(NamedTuple):
    """Keys and values [B, Hkv, M, D] with their strides."""

    k: Any
    v: Any
    k_strides: Any
    v_strides: Any


class Noted(NamedTuple):
    """destination: int16 [B, Hkv, tables, `places`], where a new token's buckets go, [B, Hkv, tables, 1]."""

    destination: Any
    buckets: Any
    places: int


class Form(NamedTuple):
    """What kernels that seal are compiled for. slots, bits: KV heads of each width, and the width.

    lanes, lane_width: of each width, the codes in a byte of the finest plane, and the channels of a lane, padded.
    heads: KV heads. dim, padded_dim: channels, and those of a tile. block: tokens of a block.
    """

    slots: tuple[int, ...]
    bits: tuple[int, ...]
    lanes: tuple[int, ...]
    lane_width: tuple[int, ...]
    heads: int
    dim: int
    padded_dim: int
    block: int


class Block(NamedTuple):
    """The tokens of one block: pointers to keys [BLOCK, D], to values with the strides given, and to their scales."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    v_token: Any
    v_channel: Any
