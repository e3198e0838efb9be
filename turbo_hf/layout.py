"""Where each bit of the compressed cache lies. Described only here; the reference and the kernels refer to this module.

Letters: `B` rows of the batch, `Hq` query heads, `Hkv` key/value heads, `D` head dim, `b` tokens per block (64), `P`
pages, `S` heads of one width ("slots"), `w` bits per code of keys, and `u` of values (mostly the same).

A *page* is one sealed block of `b` tokens of one row, for every KV head. Pages of all rows lie in one pool, and
`table[row, n]` names the page of the row's n-th block, so that rows of different lengths cost only what they hold,
beams share a prompt, and a kernel's work list is a list of pages. Heads of equal width are grouped (`PagedHeads`);
`order[row, slot]` names the head that a slot holds.

One page of one slot::

    k      uint8 [b, D*w/8]     keys, one token per line, channels packed by half-split
    v      uint8 [D, b*u/8]     values, one channel per line, tokens (in VALUE_ORDER) packed by half-split
    meta   int8  [4, D]         per channel: key zero, key span, value zero, value span; a span is unsigned, 0 to 254
                                (what has 8 bit has no lines: [2, D] if either has, [0, D] if both have)
    size   bf16  [2, b]         per token, in time order: key size, value size (16 bit: none, [0, b])

Half-split packing of n codes of w bits: byte j holds codes j, j + n/p, j + 2n/p, ..., lowest first, with p = 8/w::

    4 bit   byte j = c[j] | c[j + n/2] << 4
    2 bit   byte j = c[j] | c[j + n/4] << 2 | c[j + n/2] << 4 | c[j + 3n/4] << 6
    3 bit   lines e and o = e + 8 of each 16 are packed together, into three planes of b/2 (keys) or D/2 (values) lines
            of n/4 bytes, one plane after the other; with e0[j] = e[j], e1[j] = e[j + n/4], ..., byte j of each is
            e0[j] | e1[j] << 3 | (e3[j] & 3) << 6
            o0[j] | o1[j] << 3 | (o3[j] & 3) << 6
            e2[j] | o2[j] << 3 | (e3[j] >> 2) << 6 | (o3[j] >> 2) << 7
    8 bit   not packed: the stage 1 code itself, int8

so that a mask and a shift of whole words unpack it, without interleaving.

Keys may be stored divided by a balance, float32 [Hkv, D], one number per channel: what is said about keys here then
applies to the quotients, and queries that meet them are multiplied by it (`ops.maths.balanced_queries`).

A page has two axes: each token has a size, and each channel a range. What a code stands for::

    x[token, channel] = size[token] * (zero[channel] + code * span[channel] / (2^w - 1))     w below 8
    x[token, channel] = size[token] * code                                                  8 bit

At 8 bit, codes and sizes are those of the open tokens. Below, tokens are divided by their root mean squares, times a
unit of the block in which every zero and every zero + span is an integer from -127 to 127. At both ends, a zero and
a span leave out `INSET` of the range of their channel's numbers: the few out there lose half a step at most, all others
less. The sizes that are stored are those by which each token is, in its own direction, as long as it was: queries that
read a token most point there.

VALUE_ORDER: within each group of 16 tokens, values are in the order in which a thread of an 8-bit tensor-core
instruction holds the probabilities that it has just computed, so that P feeds P V without a shuffle.

In a layer for sparse decoding, tokens of a prompt may be stored in bucket order, separately for each head
(`turbo_hf.sparse.bucket_index`): attention does not depend on the order of keys that all its queries see.

Open tokens, the newest of each row, are INT8 codes with one scale per token and head (fp32 that bf16 can hold, rounded
up), in time order: `k_open` [B, Hkv, cap, D], `v_open` [B, Hkv, D, cap].

The first tokens of a text are unlike all others (attention sinks): sealed with ordinary ones, they widen the ranges of
the channels. So the first `FIRST` tokens of a row are never sealed. They stay at the front of its open tokens, and
block n holds tokens FIRST + n b to FIRST + (n + 1) b - 1. Attention does not depend on the order of keys, and every
query that sees a sealed token sees them: for kernels, a row is its sealed blocks, then its open tokens. Only what seals
skips them (`KVStore.first`). Where a query may not see the first tokens (a sliding window), where order has a meaning
(sparse steps), of latents, and beside 16-bit pages, all tokens are sealed.

The newest tokens of a row, to which queries attend most, stay open too where pages have fewer than 8 bit, beside the
block that is not yet whole (`KVStore.recent`). Once a block is sealed, what is behind it moves forward to its place.

A layer of latent attention (MLA) stores one "head": its latent in the place of keys (`D` channels),
and the rotary part that all its heads share in the place of values (`Dv` channels, fewer). The latent has the config's
width; the rotary part has 8 bit, or 16 beside a 16-bit latent. In all other layers `Dv` is `D`.

At 16 bit nothing is rounded: `k` [b, D] and `v` [D, b] hold the model's own numbers, tokens in time order. A layer
with a 16-bit head also keeps the open tokens of all its heads unquantized: a full-precision window.
"""

from typing import Any, NamedTuple

import torch

CODE_MAX = 127
"""Largest INT8 code of an open token."""

EDGE = 126
"""The largest number of a block lies this many units from 0 before sizes are rounded: zeros and spans then fit."""

INSET = {4: 1 / 64, 3: 1 / 32, 2: 1 / 8}
"""By width: the share of a channel's range, at each end, that its zero and span leave out. Powers of two: exact."""

FIRST = 16
"""First tokens of a row that are never sealed: a tile, so that what is behind them is aligned."""

INT8_MAX = 127
"""Largest INT8 code of values that are never sealed: P, a prompt's queries, a chunk's keys and values in the flash
loop."""

QUERY_MAX = INT8_MAX << 8
"""Largest code of a decode step's query, 16 bit: 256 * high + low, two INT8 digits."""

LEAST = 2.0**-80
"""A token none of whose numbers reaches this counts as 0: what is divided by the largest number of others is finite."""

SAS_TILE = 32
"""Keys whose maximum SAS is relative to where nothing is quantized: short enough for float32 in shared memory."""

SCORE_LIMIT = 45_000.0
"""A head whose log-sum-exp of scores exceeds this has its prompt computed in the model's own dtype.

Beyond it INT8 queries no longer distinguish keys, nor float32 the largest P of a tile from 128."""

E4M3_MAX = 448.0
"""Largest number of FP8 e4m3, the type of values and P in FP8."""

BITS = (8, 4, 3, 2)
"""Bit widths of codes."""

UNQUANTIZED = 16
"""Bit width of heads that are stored unquantized."""

WIDTHS = (UNQUANTIZED, *BITS)

Width = int | tuple[int, int]
"""Bits per code of a head: one number for keys and values, or (keys, values) where they differ."""

HeadGroups = tuple[tuple[Width, int], ...]
"""Heads of one layer: (width, number of KV heads) of each width, in slot order."""

BLOCK_SIZES = (32, 64, 128)
HEAD_DIM_MULTIPLE = 16

VALUE_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Stored position p of a group of 16 value tokens holds token VALUE_ORDER[p]."""


Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a rotary embedding, [1 or B, tokens, rotated channels]."""

CLASSIFIER = ("weight_1", "bias_1", "weight_2", "bias_2")
"""Tensors of a query classifier: [Hkv, D, hidden], [Hkv, hidden], [Hkv, hidden, C], [Hkv, C]."""


class PagedHeads(NamedTuple):
    """Pages of the KV heads that share one width (see above).

    bits: bits of keys.
    k: uint8 [P, S, b, D*bits/8]; int8 [P, S, b, D] at 8 bit; float16 or bfloat16 [P, S, b, D] at 16 bit.
    v: uint8 [P, S, D, b*value_bits/8]; int8 [P, S, D, b] at 8 bit; float16 or bfloat16 [P, S, D, b] at 16 bit.
    meta: int8 [P, S, n, D], n = 2 for keys below 8 bit, and 2 for values below 8 bit. Spans are unsigned bytes.
    size: bfloat16 [P, S, 2, b]; [P, S, 0, b] at 16 bit.
    """

    bits: int
    k: torch.Tensor
    v: torch.Tensor
    meta: torch.Tensor
    size: torch.Tensor

    @property
    def value_bits(self) -> int:
        """Bits of values."""
        return 8 * self.v.itemsize * self.v.shape[3] // self.k.shape[2]

    @property
    def width(self) -> Width:
        """Bits of keys and of values."""
        return self.bits if self.bits == self.value_bits else (self.bits, self.value_bits)


class KVStore(NamedTuple):
    """One layer's compressed cache, as ops see it.

    Row r holds `sealed[r] * block + open_len[r]` tokens: its sealed blocks, then its open tokens.

    paged: one `PagedHeads` per width, in slot order.
    order: int64 [B, Hkv], the head in each slot.
    table: int64 [B, blocks], the page of each sealed block, 0 past a row's end.
    sealed: int64 [B], sealed blocks per row.
    k_open, v_open: int8 [B, Hkv, cap, D] and [B, Hkv, D, cap]; with a 16-bit head in the type of its pages.
    k_scale, v_scale: float32 [B, Hkv, cap]; with a 16-bit head 1.
    open_len: int64 [B], open tokens per row.
    block: tokens per block.
    sealed_host: the numbers in `sealed`, where the host knows them: a launch then need not wait for the device.
    first: how many of a row's open tokens, its first ones, are never sealed: those behind them are.
    recent: how many of its newest open tokens are not sealed yet; whole blocks.
    plans: work splits of launches that will be replayed (`ops.decode.stream_k.LivePlan`, `KeptWorkspace`), made by the
        first launch and kept up to date by `ReplayableSteps`; None: nothing is replayed.
    """

    paged: tuple[PagedHeads, ...]
    order: torch.Tensor
    table: torch.Tensor
    sealed: torch.Tensor
    k_open: torch.Tensor
    v_open: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    open_len: torch.Tensor
    block: int
    sealed_host: tuple[int, ...] | None = None
    plans: dict[Any, Any] | None = None
    first: int = 0
    recent: int = 0


class Operands(NamedTuple):
    """Keys and values of a chunk as the flash loop reads them. Each row begins at place 0; places past its end are 0.

    k: int8 [B, Hkv, T, D], T a multiple of the block.
    k_scale: float32, per token [B, Hkv, T], or per block [B, Hkv, T/block].
    v: int8 or float8_e4m3fn [B, Hkv, D, T], tokens in VALUE_ORDER; None where values are not quantized.
    v_scale: float32 [B, Hkv, T/block]; None where values are not quantized.
    """

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class Scoring(NamedTuple):
    """What is done to q . k before and in the softmax.

    scaling: factor on q . k.
    softcap: scores become softcap * tanh(score / softcap); None: they stay as they are.
    sinks: float [Hq], one additional logit per head in the softmax denominator, without a value; None: none.
    sas_threshold: SAS softmax, which drops scores this far (below 0, natural log units) below the maximum of their
        block, of `SAS_TILE` keys where nothing is quantized; None: the exponential.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    sas_threshold: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this is the softmax of scaled scores and nothing more."""
        return self.softcap is None and self.sinks is None and self.sas_threshold is None


class AttentionMode(NamedTuple):
    """How one attention mode of prompts computes. Q has one scale per token, P one per query and key tile.

    k_scale: Q and K are INT8, K with one scale per "token" or per "block"; None: both are in q's dtype.
    v_type: the 8-bit type of V and P; None: `half_type` beside INT8 keys, else q's dtype.
    """

    k_scale: str | None
    v_type: torch.dtype | None

    @property
    def v_top(self) -> float:
        """The largest code of V and of P; 1 where they are not codes."""
        return {torch.int8: float(INT8_MAX), torch.float8_e4m3fn: E4M3_MAX, None: 1.0}[self.v_type]

    def p_type(self, dtype: torch.dtype) -> torch.dtype | None:
        """The type that P is rounded to for queries of `dtype`; None: it is not rounded."""
        return None if self.k_scale is None else self.v_type or half_type(dtype)


MODES = {
    "turbo": AttentionMode("block", torch.int8),
    "int8": AttentionMode("token", torch.int8),
    "half": AttentionMode("token", None),
    "fp8": AttentionMode("block", torch.float8_e4m3fn),
    "native": AttentionMode(None, None),
}
"""The attention modes of prompts. A tile's product with FP8 is accumulated in float32. Heads with scores beyond
`SCORE_LIMIT` are computed as in "native"."""

QUANTIZED_MODES = tuple(name for name, mode in MODES.items() if mode.k_scale is not None)


class Rounding(NamedTuple):
    """How a prompt's Q, K, P and V are rounded.

    mode: one of `MODES`.
    block: tokens per block of K and V, and per tile of P. Over a past, these are the past's own blocks.
    """

    mode: str = "turbo"
    block: int = 128


PROMPT_TILE = 128
"""Queries and keys of a tile of the prompt kernel for Hopper."""


class Visits(NamedTuple):
    """The buckets of cached keys, and which of them each query of a sparse decode visits.

    buckets: int16 [B, Hkv, cap], by position in the row; -1: unknown, such a key is attended to. cap is at least the
        longest row.
    visited: bool [B, Hkv, M, C], for all query heads of a KV head together.
    spans: int16 [B, Hkv, n, 2], the smallest and the largest bucket in each of the first n blocks of a row, -1:
        unknown. It tells the kernel which blocks it can skip, and does not change the result. None: none is known.
    """

    buckets: torch.Tensor
    visited: torch.Tensor
    spans: torch.Tensor | None = None


class AlwaysRead(NamedTuple):
    """The tokens that every query of a sparse decode reads.

    sink_tokens: how many of the first tokens of a row.
    window_tokens: how many of the newest tokens, the query itself included.
    """

    sink_tokens: int
    window_tokens: int


class AttentionOutput(NamedTuple):
    """out: [B, Hq, M, D] in the query's dtype. lse: float32 [B, Hq, M], natural log of the softmax denominator."""

    out: torch.Tensor
    lse: torch.Tensor


def power_of_two(n: int) -> int:
    """The smallest power of two not below n. Triton's own takes microseconds, in each launch."""
    return 1 << max(0, n - 1).bit_length()


def packed_bytes(codes: int, bits: int) -> int:
    """Bytes of `codes` codes of `bits` bits."""
    return codes * bits // 8


def widths_of(width: Width, rotary_dim: int | None = None) -> tuple[int, int]:
    """Bits of keys and of values; of a latent and its rotary part, if there is one."""
    if isinstance(width, tuple):
        return width
    return width, width if rotary_dim is None else max(width, 8)


def in_words(width: Width) -> str:
    """ "4", or "4/2" for keys of 4 bit and values of 2."""
    return "/".join(map(str, width)) if isinstance(width, tuple) else str(width)


def meta_lines(bits: int, value_bits: int) -> int:
    """Lines of `PagedHeads.meta`: a zero and a span for each of keys and values that has fewer than 8 bits."""
    return 2 * (bits < 8) + 2 * (value_bits < 8)


def page_bytes(head_dim: int, width: Width, block: int = 64, rotary_dim: int | None = None) -> int:
    """Bytes of one sealed block of one KV head: codes of K and V, zeros and spans of channels, sizes of tokens.

    rotary_dim: of a latent (see above), the channels of its rotary part; None: a head of keys and values.
    """
    bits, value_bits = widths_of(width, rotary_dim)
    values = packed_bytes(block * (rotary_dim or head_dim), value_bits)
    sizes = 4 * block if bits <= 8 else 0
    return packed_bytes(block * head_dim, bits) + values + meta_lines(bits, value_bits) * head_dim + sizes


def open_token_bytes(head_dim: int, *, unquantized: bool = False, rotary_dim: int | None = None) -> int:
    """Bytes of one open token of one KV head: codes or 16-bit numbers, and a float32 scale, for K and V. rotary_dim: as
    in `page_bytes`."""
    return (head_dim + (rotary_dim or head_dim)) * (2 if unquantized else 1) + 8


def empty_pages(
    width: Width,
    pages: int,
    slots: int,
    head_dim: int,
    block: int,
    device: torch.device,
    dtype_16bit: torch.dtype = torch.float16,
    rotary_dim: int | None = None,
) -> PagedHeads:
    """Uninitialized pages for `slots` heads of this width (shapes: `PagedHeads`). rotary_dim: as in `page_bytes`."""
    bits, value_bits = widths_of(width, rotary_dim)
    # bytes of packed codes, or the codes themselves
    code, value_code = ({UNQUANTIZED: dtype_16bit, 8: torch.int8}.get(n, torch.uint8) for n in (bits, value_bits))
    channels = rotary_dim or head_dim
    k = torch.empty(pages, slots, block, packed_bytes(head_dim, min(bits, 8)), dtype=code, device=device)
    v = torch.empty(pages, slots, channels, packed_bytes(block, min(value_bits, 8)), dtype=value_code, device=device)
    meta = torch.empty(pages, slots, meta_lines(bits, value_bits), head_dim, dtype=torch.int8, device=device)
    size = torch.empty(pages, slots, 2 * (bits <= 8), block, dtype=torch.bfloat16, device=device)
    return PagedHeads(bits, k, v, meta, size)


def value_order(block: int, device: torch.device) -> torch.Tensor:
    """int64 [block]: the token that each stored position of a block's values holds."""
    group = torch.tensor(VALUE_ORDER).to(device, non_blocking=True)
    return (torch.arange(0, block, 16, device=device)[:, None] + group).flatten()


def in_value_order(x: torch.Tensor) -> torch.Tensor:
    """x [..., tokens] in time order -> in the order of VALUE_ORDER, as blocks of values are stored. Copies."""
    stored: torch.Tensor = x.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)
    return stored


def in_time_order(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `in_value_order`."""
    tokens: torch.Tensor = x.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)
    return tokens


def half_type(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type of P and V where only Q and K are INT8: the model's own, bfloat16 for wider ones."""
    return dtype if dtype == torch.float16 else torch.bfloat16


def type_16bit(dtype: torch.dtype) -> torch.dtype:
    """The type of heads of 16 bit: the model's own, float16 for wider ones (which then round to 11 bits)."""
    return dtype if dtype == torch.bfloat16 else torch.float16


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, clamped to its range."""
    top = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
    return x.clamp(-top, top).to(dtype)


def half_split(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the lines of a page of codes of `bits` bits. uint8 [..., m, n] -> uint8 [..., m, n*bits/8]; exact."""
    lanes = codes.unflatten(-1, (4 if bits == 3 else 8 // bits, -1)).unbind(-2)
    if bits == 3:
        (e0, o0), (e1, o1), (e2, o2), (e3, o3) = (lane.unflatten(-2, (-1, 2, 8)).unbind(-3) for lane in lanes)
        first, second = e0 | e1 << 3 | (e3 & 3) << 6, o0 | o1 << 3 | (o3 & 3) << 6
        third = e2 | o2 << 3 | (e3 >> 2) << 6 | (o3 >> 2) << 7
        packed: torch.Tensor = torch.stack((first, second, third), -4).flatten(-4).unflatten(-1, (codes.shape[-2], -1))
        return packed
    byte: torch.Tensor = lanes[0]
    for lane, part in enumerate(lanes[1:], 1):
        byte = byte | (part << (lane * bits))
    return byte


def half_merge(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack what `half_split` packed. uint8 [..., m, n*bits/8] -> uint8 [..., m, n]; exact."""
    if bits == 3:
        lines, size = packed.shape[-2:]
        first, second, third = packed.flatten(-2).unflatten(-1, (3, lines // 16, 8, size * 2 // 3)).unbind(-4)
        even = first & 7, first >> 3 & 7, third & 7, first >> 6 | third >> 4 & 4
        odd = second & 7, second >> 3 & 7, third >> 3 & 7, second >> 6 | third >> 5 & 4
        return torch.stack((torch.cat(even, -1), torch.cat(odd, -1)), -3).flatten(-4, -2)
    mask = (1 << bits) - 1
    # the first lane needs no shift, the last one no mask
    between = ((packed >> shift) & mask for shift in range(bits, 8 - bits, bits))
    return torch.cat((packed & mask, *between, packed >> (8 - bits)), -1)
