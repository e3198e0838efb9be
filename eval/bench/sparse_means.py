"""Sparse steps of `bench decode` by selector "means": caches whose means make the rule choose a given share."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from turbo_hf.eval.bench.check import Check
from turbo_hf.eval.bench.decode_cases import BLOCK, Case, groups_of
from turbo_hf.eval.bench.graph_rotation import cold_copies
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.random_cache import one_head, packed_stores
from turbo_hf.eval.bench.sparse import Choice
from turbo_hf.eval.bench.steps import Found, Prepared, check_heads, our_step
from turbo_hf.eval.bench.timing import Conditions
from turbo_hf.layout import AlwaysRead, AttentionOutput, ByMeans, KVStore, PageMeans, Scoring, empty_means, page_bytes
from turbo_hf.ops.sparse.decode import sparse_decode
from turbo_hf.ops.sparse.reference import reference_sparse_decode
from turbo_hf.ops.sparse.reference_means import reference_read_blocks
from turbo_hf.ops.store.quantize import dequantize, quantize_tokens

LEFT = 0.05
LOUD = 20.0
"""The score of blocks that are to be chosen, natural log units: far above that of the others, which is 0."""


def with_means(store: KVStore, q: torch.Tensor, share: float, generator: torch.Generator) -> KVStore:
    """The store with means by which a share of each head's blocks, at random, holds all of the estimated attention."""
    (rows, heads), blocks, device = store.order.shape, store.table.shape[1], q.device
    means = empty_means(len(store.paged[0].k), heads, q.shape[3], device)
    means.mean.zero_()
    means.scale.zero_()
    # a mean key with this score for every query of a KV head
    mean = torch.linalg.pinv(q[:, :, 0].float().unflatten(1, (heads, -1))).sum(-1) * LOUD * q.shape[3] ** 0.5
    codes, unit = quantize_tokens(mean[:, :, None])
    scale = torch.cat((unit, torch.zeros_like(unit)), -1).half()
    for row in range(rows):
        for slot, head in enumerate(store.order[row].tolist()):
            drawn = torch.rand(blocks, generator=generator, device=device).argsort()[: max(1, round(share * blocks))]
            page = store.table[row, drawn]
            means.mean[page, slot], means.scale[page, slot] = codes[row, head, 0], scale[row, head]
    return store._replace(means=means)


def step(store: KVStore, q: torch.Tensor, always: AlwaysRead, backend: str, counts: torch.Tensor) -> AttentionOutput:
    """All that a sparse layer does in a step except storing the token: choice, attention, and what a report counts.

    counts: int64 [3], keys read and what `ByMeans.noted` sums up.
    """
    rule, scoring = ByMeans(LEFT, counts[1:]), Scoring(q.shape[3] ** -0.5)
    return sparse_decode(q, store, scoring, rule, always, read=counts[:1], backend=backend)


def check_means(case: Case, q: torch.Tensor, store: KVStore, always: AlwaysRead, got: AttentionOutput) -> Check:
    """Check a sample against float64 over the blocks that the reference chooses, as `check_heads` does."""

    def attended(row: int, head: int, query: torch.Tensor) -> tuple[AttentionOutput, AttentionOutput]:
        part, scoring, length = one_head(store, row, head), Scoring(case.heads.dim**-0.5), case.lengths[row]
        assert store.means is not None
        slot, page = int((store.order[row] == head).nonzero()), store.table[row, : int(store.sealed[row])]
        part = part._replace(means=PageMeans(*(x[page, slot : slot + 1] for x in store.means)))
        place = torch.full((1, 1), length - 1, device=q.device)
        read = reference_read_blocks(query, part, scoring, ByMeans(LEFT), always, place)[0, 0, 0]
        kept = torch.nn.functional.pad(read.repeat_interleave(BLOCK), (0, length - len(page) * BLOCK), value=True)
        k, v = (x[0, :, :length][:, kept] for x in dequantize(part, torch.float64))
        exact = attend(query[0], k, v, scaling=scoring.scaling, causal=False)
        return reference_sparse_decode(query, part, scoring, ByMeans(LEFT), always), exact

    return check_heads(case, q, got, attended)


def means_bytes(case: Case, width: str, share: float, always: AlwaysRead) -> int:
    """Bytes that a step must read: the means of all blocks, and the blocks that are kept."""
    heads = case.heads
    page = sum(slots * page_bytes(heads.dim, each, BLOCK) for each, slots in groups_of(width, heads.kv))
    blocks = [n // BLOCK for n in case.lengths]
    kept = sum(min(n, round(share * n) + (always.sink_tokens + always.window_tokens) // BLOCK + 1) for n in blocks)
    return kept * page + sum(blocks) * heads.kv * (heads.dim + 4)


def means_steps(case: Case, width: str, q: torch.Tensor, choice: Choice, how: Conditions) -> list[Found]:
    """The rows of a choice's shares of the blocks with their checks, and what to time if the results are right."""
    found, generator, groups = [], torch.Generator(how.device).manual_seed(how.seed), groups_of(width, case.heads.kv)
    always, sizes = choice.always, {share: means_bytes(case, width, share, choice.always) for share in choice.shares}
    stores = packed_stores(case, groups, cold_copies(min(sizes.values()), how.device), how.device, how.seed + 1)
    for share in choice.shares:
        how.tell(f"{case}: {width} bit, means, {share:.2%} of the blocks")
        first, timed = (torch.zeros(3, dtype=torch.int64, device=how.device) for _ in range(2))

        def prepare(share: float = share, first: torch.Tensor = first, timed: torch.Tensor = timed) -> Prepared:
            layers = [with_means(store, q, share, generator) for store in stores]
            step(layers[0], q, always, how.backend, first)
            calls: list[Callable[[], AttentionOutput]] = [
                partial(step, layer, q, always, how.backend, timed) for layer in layers
            ]
            return calls, partial(check_means, case, q, layers[0], always)

        row, rotation = our_step(case, f"{width} bit, means, {share:.2%}", sizes[share], how.device, prepare)
        if rotation is not None:
            density = int(first[0]) / sum(case.lengths) / case.heads.kv
            row = replace(row, note=f"{density:.2%} of the keys, always-read blocks included")
        found.append((row, rotation))
    return found
