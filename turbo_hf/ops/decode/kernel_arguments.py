"""What launches give to `decode_kernel` and `sparse_decode_kernel`, and what their parts hand each other."""

from typing import Any, NamedTuple


class DecodeQueries(NamedTuple):
    """Queries [B, Hq, M, D] and their strides."""

    data: Any
    strides: Any


class DecodeResult(NamedTuple):
    """Where results go: out [B, Hq, M, D], contiguous, and lse float32 [B, Hq, M]."""

    out: Any
    lse: Any


class Workspace(NamedTuple):
    """Scratch memory of a launch.

    parts: float32 [..., N * (DP + STATS)], partial results, as in `merge`.
    arrived: int32 [outputs], how many parts of each output are there; zeros before and after the launch.
    """

    parts: Any
    arrived: Any


class DecodeForm(NamedTuple):
    """What the kernels are compiled for.

    slots, bits, value_bits: for each width, its KV heads, and the bits of their keys and values.
    kv_heads: KV heads of the layer.
    group: query heads per KV head.
    dim, padded_dim: channels per head, and per tile.
    block: tokens per block.
    tile: blocks per tile, one per warp; if it is one, all warps share it.
    rows: query rows per tile, padded.
    spread: whether `rows` is twice the query rows there are (`rows_of`).
    turbo: whether queries are rounded to 16-bit codes.
    all_16bit: whether pages, open tokens and queries are of one 16-bit type, in tiles of one block.
    stages: stages of the load pipeline.
    at_once: parts that are merged at a time.
    """

    slots: tuple[int, ...]
    bits: tuple[int, ...]
    value_bits: tuple[int, ...]
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
    """What a program computes: a part of the query rows of one row and KV head, and where they go.

    row, head: row of the batch, and KV head.
    row_part: which part of the query rows.
    length: tokens up to and including the last query's.
    start: the first of the `tokens` columns that holds a token.
    tokens: columns of the queries.
    column: column of the result to which the first query goes.
    columns: columns of the result.
    """

    row: Any
    head: Any
    row_part: Any
    length: Any
    start: Any
    tokens: Any
    column: Any
    columns: Any


class TileRun(NamedTuple):
    """A run of tiles of one row: sealed blocks, then the open tokens.

    table, entries: pages of the row's sealed blocks, and how many entries the table has.
    page: pages of the first tile.
    sealed: sealed blocks of the row.
    begin: first tile.
    steps: number of tiles; None: those of all sealed blocks.
    """

    table: Any
    entries: Any
    page: Any
    sealed: Any
    begin: Any
    steps: Any


class Chosen(NamedTuple):
    """What a query of a sparse step attends to.

    place: the query's place in its row.
    buckets: pointer to the bucket of each token; None without buckets.
    visited: pointer to a flag for each bucket; None without buckets.
    sink, window: how many of the first and of the newest tokens are always read.
    """

    place: Any
    buckets: Any
    visited: Any
    sink: Any
    window: Any


class Share(NamedTuple):
    """The part of an output that a CTA has computed.

    alone: whether it is the whole output.
    first: place of the output's first partial result.
    part, parts: number of this part, and of all parts.
    """

    alone: Any
    first: Any
    part: Any
    parts: Any
