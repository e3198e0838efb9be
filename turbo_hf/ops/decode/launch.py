"""Launch of the decode kernel: its plan and its workspace. Imported only where it runs, as it needs Triton."""

from collections.abc import Mapping
from functools import lru_cache
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch

from turbo_hf.layout import UNQUANTIZED, AttentionOutput, HeadGroups, KVStore, Scoring, power_of_two, widths_of
from turbo_hf.ops import gpu
from turbo_hf.ops.decode.kernel import decode_kernel
from turbo_hf.ops.decode.kernel_block import STATS
from turbo_hf.ops.decode.stream_k import LivePlan, Plan, SteadyPlans, even_rounds, stream_k, tiles_of
from turbo_hf.ops.kernel_launch import Rows, cache_of, launch
from turbo_hf.ops.tuning import TILE_COST, TILE_SETUP, WIDE, DecodeTiles, decode_tiles, measured_tiles, tiles_16bit

OUTPUT_PARTS = 16
"""CTAs are rounded down to a multiple of this many parts per output: a merge costs as much as the next power of two."""

ROWS = 8
"""Rows of queries in a product of the kernel; where a head has 4 at most, half of them."""

MERGED = 128
"""Floats of partial results that a thread merges at a time: more do not fit its registers."""

MANY, MANY_WIDE = 2.0, 0.25
"""Outputs per SM from which `tuning.decode_tiles` has other tiles; the second of wide heads."""

FILLED = 10
"""Minimum tiles per CTA before more than one CTA per SM is used: below, merging half as many parts is faster."""

FILLED_SINGLE = 5
"""The same where a tile is one block."""

LEAST = 2
"""Minimum tiles per CTA, where there is a choice and a tile is one block; twice as many where a CTA is one warp."""


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
    arrived: int32 [...], a counter for each part, of CTAs that have arrived; zeros before and after the launch.
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


class PlanKey(NamedTuple):
    """What a plan depends on, besides the lengths.

    groups: (width, slots) of each width.
    row_parts: parts into which the query rows are cut.
    ctas: CTAs that run at once.
    alone: the same with one CTA per SM, for few tiles.
    blocks: blocks per tile.
    warps: warps per CTA.
    """

    groups: HeadGroups
    row_parts: int
    ctas: int
    alone: int
    blocks: int
    warps: int


@lru_cache(maxsize=64)
def _plan(tiles: tuple[int, ...], shape: PlanKey) -> Plan:
    """The plan of a cache whose rows have these numbers of tiles."""
    groups, row_parts, ctas, alone, blocks, warps = shape
    of_width = [sum(TILE_COST[bits] for bits in widths_of(width)) / 2 for width, _ in groups]
    cost = np.repeat(of_width, [slots * row_parts for _, slots in groups])
    each = np.repeat(np.array(tiles), len(cost))
    steps = int(each.sum())
    if steps < (FILLED if blocks > 1 else FILLED_SINGLE) * ctas and 2 * len(each) <= ctas:
        ctas = alone
    if warps == 1:
        # one warp merges a few parts at a time: more CTAs would cost more in the merge than they save
        ctas = min(ctas, 2 * OUTPUT_PARTS * len(each))
    # a part of a single block is not worth its merge
    enough = steps // (1 if blocks > 1 else LEAST if warps > 1 else 2 * LEAST)
    if enough < ctas:
        ctas = enough // len(each) * len(each) or max(1, enough)
    ctas = even_rounds(ctas, len(each), OUTPUT_PARTS)
    return stream_k(each, np.tile(cost, len(tiles)), ctas, TILE_SETUP * 4 / blocks)


@lru_cache(maxsize=64)
def _words(tiles: tuple[int, ...], shape: PlanKey, device: torch.device, stream: int) -> torch.Tensor:
    """The words of that plan on the device, copied in the order of that stream."""
    return _plan(tiles, shape).words.to(device, non_blocking=True)


class WorkspaceKey(NamedTuple):
    """What a workspace is made for, and who uses it: a thread may replay on another stream than it captured on, which
    may be the stream of another thread.

    ctas, outputs: how many partial results it has room for.
    floats: floats per partial result.
    """

    device: torch.device
    stream: int
    thread: int
    ctas: int
    outputs: int
    floats: int


@lru_cache(maxsize=32)
def _workspace(place: WorkspaceKey) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results, and arrival counters (zeros, as each launch leaves them)."""
    most = place.ctas + place.outputs
    return (
        torch.empty(most * place.floats, dtype=torch.float32, device=place.device),
        torch.zeros(most, dtype=torch.int32, device=place.device),
    )


def _schedule(
    sealed: tuple[int, ...],
    shape: PlanKey,
    plans: dict[Any, LivePlan] | None,
    place: WorkspaceKey,
) -> tuple[torch.Tensor, int, int, tuple[torch.Tensor, ...]]:
    """Words of the plan on the device, its CTAs, its parts rounded up to a power of two, and the workspace.

    plans: as in `KVStore`. A captured launch keeps its workspace, whichever was used since.
    """
    # as many as an output of rows that are alike has; others take longer to merge
    alike = min(OUTPUT_PARTS, power_of_two(-(-shape.ctas // place.outputs) + 1))
    # few rows get as many soon, and need one kernel; more rows have fewer, and merge no more than they have
    least = alike if alike == OUTPUT_PARTS else 1
    if plans is None:
        tiles = tuple(tiles_of(sealed, shape.blocks))
        plan = _plan(tiles, shape)
        words = _words(tiles, shape, place.device, place.stream)
        return words, plan.ctas, max(least, power_of_two(plan.parts)), _workspace(place)
    if (shape, place) not in plans:
        steady = isinstance(plans, SteadyPlans)
        plans[shape, place] = LivePlan(
            lambda n: _plan(tuple(tiles_of(n, shape.blocks)), shape),
            sealed,
            shape.ctas,
            place.device,
            _workspace(place),
            alike if steady else least,
            steady,
        )
    live = plans[shape, place]
    return live.words, live.ctas, live.parts, live.workspace


def padded_dim(q: torch.Tensor) -> int:
    """Channels of a tile for queries like q."""
    return max(32, power_of_two(q.shape[3]))


def query_parts(queries: int) -> tuple[int, int]:
    """Queries of a KV head in an output, and how many outputs they make."""
    per_output = ROWS // 2 if queries <= ROWS // 2 else ROWS
    return per_output, -(-queries // per_output)


def many_outputs(q: torch.Tensor, kv_heads: int, block: int) -> bool:
    """`many` of `tuning.decode_tiles` for queries [B, Hq, M, D]. block: tokens."""
    batch, heads, tokens, _ = q.shape
    outputs = batch * kv_heads * query_parts(heads // kv_heads * tokens)[1]
    return outputs >= (MANY_WIDE if padded_dim(q) * block >= WIDE else MANY) * gpu.sms(q.device)


def tiles_for(
    q: torch.Tensor,
    store: KVStore,
    mode: str,
    *,
    many: bool = False,
    measured: Mapping[str, DecodeTiles] | None = None,
) -> tuple[DecodeTiles, bool, int]:
    """Tiles for queries like q, whether they become codes, their channels, padded. measured: as in `decode_tiles`."""
    padded = padded_dim(q)
    widths = {pages.bits for pages in store.paged}
    turbo = mode == "turbo" and widths != {UNQUANTIZED}
    unpacks = widths != {UNQUANTIZED} if mode == "native" else max(widths) == UNQUANTIZED and q.element_size() > 2
    tiles = decode_tiles(
        padded * store.block,
        (max(widths), max(pages.value_bits for pages in store.paged)),
        unpacks,
        many=many,
        itemsize=q.element_size(),
        shared=gpu.shared_memory(q.device),
        measured=measured,
    )
    return tiles, turbo, padded


def decode_form(
    q: torch.Tensor, store: KVStore, queries: int, tune: DecodeTiles, turbo: bool, parts: int, all_16bit: bool = False
) -> DecodeForm:
    """What the kernels are compiled for. queries: of a KV head. parts: of an output, at most."""
    (per_output, _), padded, kv_heads = query_parts(queries), padded_dim(q), store.k_open.shape[1]
    slots, bits, value_bits = zip(
        *((pages.k.shape[1], pages.bits, pages.value_bits) for pages in store.paged), strict=True
    )
    return DecodeForm(
        slots=slots,
        bits=bits,
        value_bits=value_bits,
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        dim=q.shape[3],
        padded_dim=padded,
        block=store.block,
        tile=tune.blocks,
        rows=ROWS,
        spread=queries <= ROWS // 2,
        turbo=turbo,
        all_16bit=all_16bit,
        stages=tune.stages,
        at_once=max(1, min(parts, MERGED * 32 * tune.warps // (per_output * padded))),
    )


def launch_decode(
    q: torch.Tensor,
    store: KVStore,
    scoring: Scoring,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    mode: str = "turbo",
) -> AttentionOutput:
    """`DecodeOps.decode` by the Triton kernel; arguments as there, checked."""
    tokens, kv_heads = q.shape[2], store.k_open.shape[1]
    queries = q.shape[1] // kv_heads * tokens
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)
    per_output, row_parts = query_parts(queries)
    groups = tuple((pages.width, pages.k.shape[1]) for pages in store.paged)
    many = many_outputs(q, kv_heads, store.block)
    tune, turbo, padded = tiles_for(q, store, mode, many=many, measured=measured_tiles(q.device))
    sealed = store.sealed_host
    if sealed is None:
        sealed = tuple(store.sealed.tolist())
    types = {store.k_open.dtype, store.v_open.dtype, *(pages.k.dtype for pages in store.paged)}
    alike = types == {q.dtype} and len(store.paged) == 1 and scoring.sas_threshold is None
    tune_16bit = tiles_16bit(padded * store.block, gpu.shared_memory(q.device)) if alike else None
    tune = tune_16bit or tune
    warps = tune.warps
    most = gpu.sms(q.device) * tune.occupancy
    shape = PlanKey(groups, row_parts, most, gpu.sms(q.device) if warps == 4 else most, tune.blocks, warps)
    outputs, floats = len(sealed) * kv_heads * row_parts, per_output * (padded + STATS.value)
    place = WorkspaceKey(q.device, gpu.stream(q.device), get_ident(), most, outputs, floats)
    words, grid, most_parts, (parts, arrived) = _schedule(sealed, shape, store.plans, place)
    order = store.order.contiguous()
    with gpu.explain_out_of_resources(q):
        launch(
            decode_kernel,
            q,
            (grid,),
            DecodeQueries(q, q.stride()),
            DecodeResult(out, lse),
            cache_of(store),
            Rows(order, store.sealed, store.open_len, starts),
            store.table,
            words,
            Workspace(parts, arrived),
            scoring,
            store.table.stride(0),
            store.table.shape[1],
            window,
            tokens,
            FORM=decode_form(q, store, queries, tune, turbo, most_parts, tune_16bit is not None),
            **gpu.pdl(q.device),
            ASM=q.is_cuda,
            num_warps=warps,
            **gpu.FMA,
        )
    return AttentionOutput(out, lse)
