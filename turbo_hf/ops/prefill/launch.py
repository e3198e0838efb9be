"""Launches of the prefill kernels. Imported only where one runs, as it needs Triton."""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from turbo_hf.layout import (
    MODES,
    PROMPT_TILE,
    SAS_TILE,
    AttentionOutput,
    KVStore,
    Operands,
    Rounding,
    Scoring,
    half_type,
    power_of_two,
)
from turbo_hf.ops import gpu
from turbo_hf.ops.prefill.kernel import merge_parts_kernel, prefill_kernel
from turbo_hf.ops.prefill.kernel_operands import (
    quantize_operands_kernel,
    unpack_past_kernel,
    unpack_tiles_kernel,
)
from turbo_hf.ops.store.launch import pairs_of
from turbo_hf.ops.tuning import PrefillTiles, fills_sms, in_tiles, past_parts, prefill_tiles

REPAIR_PROGRAMS = 264
"""Programs that check whether any head holds NaN or Inf: two per SM of an H200."""

UNPACK_WARPS = 16
"""Warps that unpack a tile of a past: 0.37 ms for 120k tokens of 8 heads of 128 on an H100, with 4 of them 0.47."""

MERGED = 8
"""Queries whose parts a program merges."""

TL_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}


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


def _padded_dim(dim: int) -> int:
    """Channels of a tile: a power of two, and enough for an 8-bit product."""
    return max(32, power_of_two(dim))


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _view(x: torch.Tensor) -> View:
    return View(x, x.stride()[:3])


def launch_quantize_operands(
    k: torch.Tensor,
    v: torch.Tensor,
    rounding: Rounding,
    starts: torch.Tensor | None,
    broken: torch.Tensor | None = None,
) -> tuple[Operands, torch.Tensor | None]:
    """As `reference_quantize_operands`, in one launch; and the log2 of `v_scale`.

    broken: int32 [B*Hkv], set to 1 for heads that contain NaN or Inf; None: it is not asked for.
    """
    mode, block = MODES[rounding.mode], rounding.block
    batch, heads, tokens, dim = k.shape
    padded = -(-tokens // block) * block
    device, by_token = k.device, mode.k_scale == "token"
    k, v = _last_contiguous(k), _last_contiguous(v)
    broken = torch.empty(batch * heads, dtype=torch.int32, device=device) if broken is None else broken
    k_codes = torch.empty(batch, heads, padded, dim, dtype=torch.int8, device=device)
    k_scale = torch.empty(batch, heads, padded if by_token else padded // block, device=device)
    v_codes = v_block = v_log2 = None
    if mode.v_type is not None:
        v_codes = torch.empty(batch, heads, dim, padded, dtype=mode.v_type, device=device)
        v_block, v_log2 = torch.empty(2, batch, heads, padded // block, device=device)
    grid = (padded // block, pairs_of(batch, heads))
    with torch.cuda.device_of(k):
        quantize_operands_kernel[grid](
            k, v, k_codes, k_scale, v_codes, v_block, v_log2, broken, starts,
            *k.stride()[:3], *v.stride()[:3], tokens, padded,
            HEADS=heads, D=dim, DP=_padded_dim(dim), BLOCK=block, K_TOKEN=by_token, V_TOP=mode.v_top, **gpu.FMA,
        )  # fmt: skip
    return Operands(k_codes, k_scale, v_codes, v_block), v_log2


def unpack_past(
    past: KVStore, keys: torch.dtype = torch.int8, values: torch.dtype = torch.int8, in_time: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sealed blocks of a cache: k [B, Hkv, T, D], v [B, Hkv, D, T], and [B, Hkv, T/b, 2]: the scale of keys, log2
    of that of values.

    keys, values: types of k and v. INT8: codes with one scale for each block, as `past_operands`; else the numbers
        themselves.
    in_time: v is in the order of time, not in VALUE_ORDER. Places past a row's end are not written.
    """
    batch, heads, _, dim = past.k_open.shape
    blocks, first, device = past.table.shape[1], 0, past.k_open.device
    order, table = past.order.contiguous(), past.table.contiguous()
    k = torch.empty(batch, heads, blocks * past.block, dim, dtype=keys, device=device)
    v = torch.empty(batch, heads, dim, blocks * past.block, dtype=values, device=device)
    scale = torch.empty(batch, heads, blocks, 2, device=device)
    with torch.cuda.device_of(k):
        for pages in past.paged:
            slots = pages.k.shape[1]
            if blocks:
                unpack_past_kernel[(blocks, slots, batch)](
                    pages.k, pages.v, pages.meta, pages.size, table, past.sealed, order, k, v, scale,
                    blocks, first, HEADS=heads, SLOTS=slots, D=dim, DP=_padded_dim(dim), BLOCK=past.block,
                    BITS=pages.bits, VALUE_BITS=pages.value_bits, IN_TIME=in_time, **gpu.FMA,
                )  # fmt: skip
            first += slots
    return k, v, scale


def _held(past: KVStore, dtype: torch.dtype, mode: str, *, tiled: bool) -> Past:
    """A past for queries of `dtype`. tiled: as the kernel for Hopper reads it."""
    values, precise = MODES[mode].v_type, mode == "native"
    if tiled and values is not None:
        return unpack_tiles(past, values)
    # codes serve INT8 and FP8, which the kernel rounds them to
    types = (dtype, dtype) if precise else (torch.int8, torch.int8 if values else half_type(dtype))
    opened = (past.k_open, past.v_open, past.k_scale, past.v_scale, past.open_len)
    room = past.table.shape[1] * past.block
    return Past(*unpack_past(past, *types, in_time=precise), past.sealed, *opened, room, past.k_open.shape[2])


def unpack_tiles(past: KVStore, values: torch.dtype) -> Past:
    """A past of blocks of 64 in tiles of 128, open tokens included, as both kernels read it.

    values: INT8 or FP8, the type of v.
    """
    batch, heads, cap, dim = past.k_open.shape
    tiles, device = -(-(past.table.shape[1] * 64 + cap) // 128), past.k_open.device
    k = torch.empty(batch, heads, tiles * 128, dim, dtype=torch.int8, device=device)
    v = torch.empty(batch, heads, dim, tiles * 128, dtype=values, device=device)
    scale = torch.empty(batch, heads, tiles * 2, 2, device=device)
    opened = (past.k_open, past.v_open, past.k_scale, past.v_scale, past.open_len)
    held = Past(k, v, scale, past.sealed, *opened, tiles * 128, cap)
    order, table, first = past.order.contiguous(), past.table.contiguous(), 0
    with torch.cuda.device_of(k):
        for pages in past.paged:
            slots = pages.k.shape[1]
            unpack_tiles_kernel[(tiles, slots, batch)](
                held, pages, table, order, table.shape[1], first, HEADS=heads, SLOTS=slots, D=dim, BITS=pages.bits,
                VALUE_BITS=pages.value_bits, num_warps=UNPACK_WARPS, **gpu.FMA,
            )  # fmt: skip
            first += slots
    return held


def launch_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    rounding: Rounding,
    past: KVStore | None,
    starts: torch.Tensor | None,
    window: int | None,
) -> AttentionOutput:
    """`PrefillOps.prefill`: quantize keys and values, unpack the past, and one launch for the rest."""
    batch, heads, tokens, dim = q.shape
    kv_heads, pairs = k.shape[1], batch * heads
    q, k, v = (_last_contiguous(x) for x in (q, k, v))
    padded_dim, block = _padded_dim(dim), rounding.block

    def tiles_of(name: str) -> PrefillTiles:
        tile = SAS_TILE if name == "native" and scoring.sas_threshold is not None else block
        return prefill_tiles(
            name, padded_dim, q.element_size(), tile, gpu.shared_memory(q.device), past=past is not None
        )

    room = 0 if past is None else past.table.shape[1] * past.block
    hopper = _hopper_serves(q, rounding, scoring, past, room, window)
    rows = PROMPT_TILE if hopper else tiles_of(rounding.mode).block_m
    parts = past_parts(-(-tokens // rows) * pairs, room, q.device)
    found = first = _outputs(q, starts is not None and parts == 1)
    if parts > 1:
        first = AttentionOutput(*(torch.empty(parts, *x.shape, device=q.device) for x in found))
    flags = torch.empty if rounding.mode == "native" else torch.zeros
    broken = flags(pairs + batch * kv_heads, dtype=torch.int32, device=q.device)
    held = None if past is None else _held(past, q.dtype, rounding.mode, tiled=hopper)
    # scores are in units of log2
    kernel_scoring = scoring._replace(softcap=scoring.softcap and scoring.softcap * math.log2(math.e))

    def run(
        operands: Operands,
        name: str,
        logs: torch.Tensor | None = None,
        *,
        repair: bool = False,
    ) -> None:
        mode, precise, tiles = MODES[name], name == "native", tiles_of(name)
        split = parts > 1 and not repair
        past_block = 64 if past is None else past.block
        past_tile = min(past_block, tiles.block_n) if precise else past_block
        described, values = TensorDescriptor.from_tensor, operands.v
        k_tiles = None if precise else described(operands.k.view(-1, dim), [block, padded_dim])
        v_tiles = None if values is None else described(values.view(-1, values.shape[3]), [padded_dim, block])
        chunk = Chunk(
            None if k_tiles else _view(k), None if v_tiles else _view(v), operands.k_scale, logs, starts,
            operands.k.shape[2],
        )  # fmt: skip
        form = PrefillForm(
            heads=heads, group=heads // kv_heads, dim=dim, padded_dim=padded_dim, block_m=tiles.block_m,
            block=tiles.block_n, past_block=past_block, past_tile=past_tile, window=window or 0,
            p_type=TL_TYPES[mode.p_type(q.dtype) or q.dtype], p_log2=math.log2(mode.v_top),
            k_token=mode.k_scale == "token", split=split, in_time=rounding.mode == "native",
        )  # fmt: skip
        programs = -(-tokens // tiles.block_m) * pairs * (1 if repair else parts)
        to = PrefillResult(
            View(first.out, None) if split else _view(found.out), (first if split else found).lse, broken
        )
        prefill_kernel[(min(programs, REPAIR_PROGRAMS) if repair else programs,)](
            _view(q), k_tiles, v_tiles, chunk, held,
            kernel_scoring, to, pairs, tokens, parts, FORM=form, REPAIR=repair,
            FLAGS=power_of_two(broken.numel()) if repair else 1, num_warps=tiles.warps, num_stages=tiles.stages,
            **gpu.FMA,
        )  # fmt: skip

    precise_parts = Operands(k, k)
    with torch.cuda.device_of(q), gpu.explain_out_of_resources(q):
        if rounding.mode == "native":
            run(precise_parts, "native")
        else:
            operands, v_log2 = launch_quantize_operands(k, v, rounding, starts, broken[pairs:])
            if hopper:
                from turbo_hf.ops.prefill.launch_hopper import launch_hopper_prefill  # noqa: PLC0415 - needs Gluon

                launch_hopper_prefill(q, operands, v_log2, first, broken, scoring, held, parts, starts)
            else:
                run(operands, rounding.mode, v_log2)
        if parts > 1:
            merge_parts_kernel[(-(-tokens // MERGED) * pairs,)](
                *first, starts, found.out, *found.out.stride()[:3], found.lse, pairs, tokens, PARTS=parts, HEADS=heads,
                D=dim, DP=padded_dim, ROWS=MERGED, **gpu.FMA,
            )  # fmt: skip
        if rounding.mode != "native":
            # what INT8 cannot represent (NaN, Inf, extreme scores) is recomputed in the model's own precision
            run(precise_parts, "native", repair=True)
    return found


def _outputs(q: torch.Tensor, padded: bool) -> AttentionOutput:
    """Where results go. padded: not all of it will be written: 0, and -inf for the lse."""
    batch, heads, tokens, dim = q.shape
    out = torch.zeros if padded else torch.empty
    lse = torch.empty(batch, heads, tokens, device=q.device)
    if padded:
        lse.fill_(-torch.inf)
    return AttentionOutput(out(batch, tokens, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2), lse)


def _hopper_serves(
    q: torch.Tensor,
    rounding: Rounding,
    scoring: Scoring,
    past: KVStore | None,
    room: int,
    window: int | None,
) -> bool:
    """Whether the kernel for Hopper computes what `prefill_kernel` would, over a past also as fast. room: tokens of the
    past that programs may share."""
    if past is not None and not (in_tiles(past) and fills_sms(q, room)):
        return False
    plain = scoring.is_plain and (window is None or (past is None and window >= q.shape[2]))
    scales = MODES[rounding.mode].k_scale == "block" and rounding.block == 128
    narrow = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] in (64, 128)
    return gpu.hopper(q.device) and plain and scales and narrow
