"""Launches of the kernels of sparse decode, and their workspace. Imported only where one runs, as it needs Triton."""

from collections.abc import Mapping
from functools import cache, lru_cache
from threading import get_ident

import torch
import triton

from turbo_hf.layout import (
    CLASSIFIER,
    AlwaysRead,
    AttentionOutput,
    KVStore,
    Rotary,
    Scoring,
    Visits,
    power_of_two,
)
from turbo_hf.ops import gpu
from turbo_hf.ops.decode.kernel_block import STATS
from turbo_hf.ops.decode.launch import (
    FILLED,
    DecodeQueries,
    DecodeResult,
    Workspace,
    decode_form,
    query_parts,
    tiles_for,
)
from turbo_hf.ops.decode.stream_k import KeptWorkspace
from turbo_hf.ops.kernel_launch import Rows, cache_of
from turbo_hf.ops.sparse.kernel_decode import sparse_decode_kernel
from turbo_hf.ops.sparse.kernel_lists import Index, Lists, list_kernel
from turbo_hf.ops.sparse.kernel_select import assign_kernel, layer_kernel, logits_kernel, rank_kernel
from turbo_hf.ops.store.launch import pairs_of

SCAN = 2048
"""Blocks whose spans are scanned at a time."""

SHARES = 4
"""Shares per CTA where there are many outputs: enough that most CTAs end at about the same time."""


def _turns(rotary: Rotary | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """cos, sin, their stride per row (0: one for all rows), and the number of rotated channels."""
    if rotary is None:
        return unused, unused, 0, 0
    cos, sin = (part.contiguous() for part in rotary)
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.shape[2]


def launch_assign(keys: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None) -> torch.Tensor:
    """`SparseOps.assign`."""
    batch, heads, tokens, dim = keys.shape
    out = torch.empty(batch, heads, tokens, dtype=torch.int16, device=keys.device)
    padded = max(16, power_of_two(dim))
    cos, sin, stride, turned = _turns(rotary, keys)
    tile = 128 * 128 // max(padded, 128) // (2 if centroids.element_size() > 2 else 1)
    tile = min(tile, max(16, power_of_two(centroids.shape[1])))
    with torch.cuda.device_of(keys):
        assign_kernel[(triton.cdiv(tokens, 64), pairs_of(batch, heads))](
            keys, centroids.contiguous(), out, cos, sin, keys.stride(), stride, tokens, centroids.shape[1],
            HEADS=heads, D=dim, DP=padded, TOKENS=64, TILE=tile, ROTARY=turned, STAGES=2, num_warps=4, **gpu.FMA,
        )  # fmt: skip
    return out


RANKED = 16
"""Buckets per program; each is compared with all others."""

COMPARED = 1024
"""Buckets that these are compared with at a time."""

UNITS = 64
"""Hidden units per program of a layer on queries; an iteration of the second layer takes twice as many."""

VECTORS = 16
"""Query vectors of one KV head, of any rows, for which weights are read once; more in larger groups."""

BUCKETS_AT_ONCE = 64
"""Buckets per program of the second layer: a step has few heads, and every SM should read a part of the weights."""


KEYS = 16
"""New keys of one KV head, of any rows, for which centroids are read once."""

NEAR = 32
"""Centroids per program: every SM should read a part of them."""


@cache
def _bests(device: torch.device, stream: int, thread: int, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best centroids of each chunk so far, and arrival counters, as each launch leaves them.

    Never released, because captured launches refer to it: 132 bytes per chunk.
    """
    with torch.inference_mode(False):
        least = torch.full((chunks, KEYS), torch.iinfo(torch.int64).min, dtype=torch.int64, device=device)
        return least, torch.zeros(chunks, dtype=torch.int32, device=device)


def launch_assign_and_score(
    keys: torch.Tensor,
    queries: torch.Tensor,
    centroids: torch.Tensor,
    classifier: Mapping[str, torch.Tensor] | None = None,
    *,
    rotary: Rotary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`SparseOps.assign_and_score`: a launch per layer of the classifier, of which the first finds the buckets too."""
    batch, heads, tokens, group, dim = queries.shape
    centroids, device, asking = centroids.contiguous(), queries.device, batch * tokens
    weight, bias = centroids.mT, None
    if classifier is not None:
        weight, bias, weight_2, bias_2 = (classifier[name].contiguous() for name in CLASSIFIER)
    units, buckets, padded = weight.shape[2], centroids.shape[1], power_of_two(group)
    rows, pdl = max(VECTORS, padded), gpu.pdl(device)
    found = torch.empty(keys.shape[:3], dtype=torch.int16, device=device)
    out = torch.empty(batch, heads, tokens, units, dtype=torch.float32, device=device)
    cos, sin, stride, turned = _turns(rotary, queries)
    bests = _bests(device, gpu.stream(device), get_ident(), heads * triton.cdiv(asking, KEYS))
    tiles = triton.cdiv(units, UNITS) + triton.cdiv(buckets, NEAR)
    with torch.cuda.device_of(queries):
        layer_kernel[(tiles, heads, max(triton.cdiv(asking, rows // padded), triton.cdiv(asking, KEYS)))](
            queries, weight, weight if bias is None else bias, out, cos, sin, (keys, centroids, found, *bests),
            queries.stride(), weight.stride(), keys.stride(), stride, asking, tokens, heads, units, buckets,
            GROUP=group, G=padded, ROWS=rows, D=dim, DP=max(16, power_of_two(dim)), TILE=UNITS, ROTARY=turned,
            RELU=bias is not None, KEYS=KEYS, NEAR=NEAR, PDL=pdl["PDL"], num_warps=4, **gpu.FMA,
        )  # fmt: skip
        if classifier is None:
            return found, out
        logits, tile = torch.empty(batch, heads, tokens, buckets, dtype=torch.float32, device=device), BUCKETS_AT_ONCE
        logits_kernel[(triton.cdiv(buckets, tile), heads, triton.cdiv(asking, VECTORS))](
            out, weight_2, bias_2, logits, tokens, batch, heads, units, buckets, group, ROWS=VECTORS, TILE=tile,
            UNITS=2 * UNITS, WHOLE=units % (2 * UNITS) == 0 and buckets % tile == 0, STAGES=4, **pdl, num_warps=4,
            **gpu.FMA,
        )  # fmt: skip
    return found, logits


def launch_visit(logits: torch.Tensor, probes: int) -> torch.Tensor:
    """`SparseOps.visit`."""
    buckets = logits.shape[-1]
    out = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    with torch.cuda.device_of(logits):
        rank_kernel[(out.numel() // buckets, triton.cdiv(buckets, RANKED))](
            logits.contiguous(), out.view(torch.uint8), buckets, probes, OWN=RANKED,
            TILE=min(COMPARED, max(16, power_of_two(buckets))), **gpu.pdl(logits.device), num_warps=4, **gpu.FMA,
        )  # fmt: skip
    return out


@lru_cache(maxsize=16)
def _workspace(
    device: torch.device,
    stream: int,
    thread: int,
    lists: int,
    capacity: int,
    shares: int,
    floats: int,
) -> tuple[torch.Tensor, ...]:
    """Listed blocks, their counts, arrival counters of shares (zeros, as launches leave them), and partial results.

    Two launches use it one after the other, so threads that share a stream have one each.
    """
    return (
        torch.empty(lists * capacity, dtype=torch.int64, device=device),
        torch.empty(lists, dtype=torch.int32, device=device),
        torch.zeros(shares, dtype=torch.int32, device=device),
        torch.empty(shares * floats, dtype=torch.float32, device=device),
    )


def launch_sparse_decode(
    q: torch.Tensor,
    store: KVStore,
    scoring: Scoring,
    visits: Visits | None,
    always: AlwaysRead,
    starts: torch.Tensor | None = None,
    mode: str = "turbo",
    read: torch.Tensor | None = None,
) -> AttentionOutput:
    """`SparseOps.sparse_decode`; arguments as there, already checked."""
    batch, heads, queries, _ = q.shape
    kv_heads = store.k_open.shape[1]
    group = heads // kv_heads
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)
    (per_output, row_parts), lists = query_parts(group), batch * kv_heads * queries
    tune, turbo, padded = tiles_for(q, store, mode)
    ctas = gpu.sms(q.device) * tune.occupancy
    alone = gpu.sms(q.device) if tune.warps == 4 else ctas
    # two iterations of the merge for an output with the mean number of parts: with 8 outputs, measured faster than one
    usual = power_of_two(max(4, alone // (2 * lists * row_parts)))
    # `tiles_of_share`: as many shares as CTAs; with many outputs SHARES per CTA, and at least one per output
    shares = SHARES * ctas + lists * row_parts
    # sealed blocks of the longest row, rounded up to a power of two: a growing cache needs a new workspace rarely
    capacity = power_of_two(max(32, store.table.shape[1]))
    floats = per_output * (padded + STATS.value)
    shape = (q.device, gpu.stream(q.device), get_ident(), lists, capacity, shares, floats)
    if store.plans is None:
        workspace = _workspace(*shape)
    else:
        # launches that are replayed refer to it: it stays as long as they do
        if shape not in store.plans:
            store.plans[shape] = KeptWorkspace(_workspace(*shape))
        workspace = store.plans[shape].words
    listed, listed_count, arrived, parts = workspace
    index, flags, spans = None, listed_count, None
    if visits is not None:
        spans = visits.spans
        flags = visits.visited.contiguous().view(torch.uint8)
        index = Index(visits.buckets.contiguous(), flags, flags.shape[-1])
    rows_held = Rows(store.order.contiguous(), store.sealed, store.open_len, starts)
    lists_held = Lists(listed, listed_count)
    sink, window = always
    spanned = listed_count if spans is None else spans.contiguous().view(torch.int32)
    pdl = gpu.pdl(q.device)
    with torch.cuda.device_of(q), gpu.explain_out_of_resources(q):
        list_kernel[(lists,)](
            spanned, flags, rows_held, store.table, lists_held, store.table.stride(0), capacity,
            0 if spans is None else spans.shape[2], window, queries, flags.shape[-1], sink, KV=kv_heads,
            BLOCK=store.block, SCAN=SCAN, INDEX=index is not None,
            BUCKETS=1 if index is None else power_of_two(index.clusters), **pdl, num_warps=8, **gpu.FMA,
        )  # fmt: skip
        sparse_decode_kernel[(ctas,)](
            DecodeQueries(q, q.stride()), DecodeResult(out, lse), cache_of(store), rows_held,
            index, lists_held, Workspace(parts, arrived), scoring, read,
            capacity, 0 if index is None else index.buckets.shape[-1], lists * row_parts, window, queries, sink,
            alone, FORM=decode_form(q, store, group, tune, turbo, usual), OUTPUTS=power_of_two(lists * row_parts),
            FILLED=FILLED, SHARES=SHARES, **pdl, ASM=q.is_cuda, num_warps=tune.warps, **gpu.FMA,
        )  # fmt: skip
    return AttentionOutput(out, lse)
