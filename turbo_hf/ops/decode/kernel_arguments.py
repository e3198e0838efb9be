"""What launches give to `decode_kernel` and `sparse_decode_kernel`, and what their parts hand each other."""

from typing import Any, NamedTuple


class Queries(NamedTuple):
    """Queries [B, Hq, M, D] and their strides."""

    data: Any
    strides: Any


class Result(NamedTuple):
    """Where results go: out [B, Hq, M, D], contiguous, and lse float32 [B, Hq, M]."""

    out: Any
    lse: Any


class Workspace(NamedTuple):
    """parts: float32 [..., N * (DP + STATS)], partial results, as in `merge`. arrived: int32 [outputs], how many of an
    output's are there: zeros before and after."""

    parts: Any
    arrived: Any


class Form(NamedTuple):
    """What the kernels are compiled for. slots, bits: KV heads of each width, and the width.

    kv_heads, group: KV heads, and query heads of each. dim, padded_dim: channels, and those of a tile. block: tokens of
    a block. tile: blocks of a tile, one per warp. rows: query rows of a tile, padded; spread: they are twice the rows
    there are (`rows_of`). turbo: queries become INT8. all_16bit: pages, open tokens and queries are of one 16-bit type,
    in tiles of one block. stages: of the load pipeline. at_once: parts that are merged at a time.
    """

    slots: tuple[int, ...]
    bits: tuple[int, ...]
    kv_heads: int
    group: int
    dim: int
    padded_dim: int
    block: int
    tile: int
    rows: int
    spread: bool
    turbo: bool
    all_16bit: bool
    stages: int
    at_once: int


class Output(NamedTuple):
    """What a program computes: part `row_part` of the query rows of a row and KV head, and where they go.

    length: tokens up to and including the last query's. start: the first of `tokens` columns that holds a token.
    column: of `columns` in the result, where the first goes.
    """

    row: Any
    head: Any
    row_part: Any
    length: Any
    start: Any
    tokens: Any
    column: Any
    columns: Any


class Run(NamedTuple):
    """`steps` tiles from `begin` on of the `sealed` blocks, and then of the open tokens, of a row.

    table: of `entries` pages, those of sealed blocks. page: of the first tile. steps: None for all sealed blocks.
    """

    table: Any
    entries: Any
    page: Any
    sealed: Any
    begin: Any
    steps: Any


class Chosen(NamedTuple):
    """What a query at `place` attends to: the first `sink` tokens, the newest `window`, and those of visited buckets.

    buckets: pointer to the tokens' buckets, visited: to the buckets' flags; or both None.
    """

    place: Any
    buckets: Any
    visited: Any
    sink: Any
    window: Any


class Share(NamedTuple):
    """Part `part` of the `parts` of an output, whose partial results lie from place `first` on. alone: it is the
    only one."""

    alone: Any
    first: Any
    part: Any
    parts: Any
