"""Sparse steps of `bench decode` that read the keys of some buckets: selection, index and attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from turbo_hf.eval.bench.checked import Check, Found, Prepared, check_heads, our_step
from turbo_hf.eval.bench.random_cache import draw, packed_stores
from turbo_hf.eval.bench.shapes import BLOCK, Case, groups_of
from turbo_hf.eval.bench.timing import Conditions, cold_copies
from turbo_hf.layout import AlwaysRead, AttentionOutput, KVStore, Rotary, Scoring, Visits, widths_of
from turbo_hf.ops.layer_ops import LayerOps
from turbo_hf.ops.sparse.reference import reference_sparse_decode
from turbo_hf.sparse.bucket_index import SPARE

SELECTORS = ("saap", "kmeans", "kmeans-rotated")
"""What chooses the buckets: the query classifier, or centroids, of keys before or after rotary embedding."""

SPARSE_SIZES = ("1x32k", "1x131k", "1x524k")
SHARES = (0.01, 0.02, 0.04, 0.08)
ALWAYS = AlwaysRead(1, 2047)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is visited.

    selector: of SELECTORS.
    shares: of the buckets; a step for each.
    buckets: of each KV head.
    hidden: units of the classifier.
    always: what is read whatever is chosen.
    """

    selector: str
    shares: tuple[float, ...]
    buckets: int = 1024
    hidden: int = 1024
    always: AlwaysRead = ALWAYS


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """One sparse layer.

    store: its cache.
    index: buckets of its tokens.
    spans: as in `ops.sparse.sparse_decode`.
    centroids, classifier: its weights; classifier None where centroids choose.
    rotary: rotation of the newest token; None where centroids are of keys after rotary embedding.
    """

    store: KVStore
    index: torch.Tensor
    spans: torch.Tensor
    centroids: torch.Tensor
    classifier: dict[str, torch.Tensor] | None
    rotary: Rotary | None


def make_layers(
    case: Case, width: str, choice: Choice, count: int, device: torch.device, seed: int
) -> list[SparseLayer]:
    """`count` layers that share nothing but sizes.

    Keys are assigned to buckets at random and stored in bucket order, as a cache stores those of a prompt.
    """
    heads, generator = case.heads, torch.Generator(device).manual_seed(seed)
    groups = groups_of(width, heads.kv)
    stores = packed_stores(case, groups, count, device, seed)
    cap = max(case.lengths)

    def weight(*shape: int) -> torch.Tensor:
        drawn = torch.randn(heads.kv, *shape, generator=generator, device=device)
        return torch.div(drawn, shape[0] ** 0.5).to(torch.float16)

    layers = []
    for store in stores:
        shape = (len(case.lengths), heads.kv, cap)
        index = torch.randint(choice.buckets, shape, generator=generator, device=device, dtype=torch.int16)
        spans = in_order(index, case.lengths, store.block, choice)
        centroids = torch.nn.functional.normalize(weight(choice.buckets, heads.dim), dim=-1)
        shapes = {
            "weight_1": (heads.dim, choice.hidden),
            "bias_1": (choice.hidden,),
            "weight_2": (choice.hidden, choice.buckets),
            "bias_2": (choice.buckets,),
        }
        angle = torch.rand(1, 1, heads.dim // 2, generator=generator, device=device).repeat(1, 1, 2)
        rotary = None if choice.selector == "kmeans-rotated" else (angle.cos().half(), angle.sin().half())
        trained = choice.selector == "saap"
        classifier = {name: weight(*shape) for name, shape in shapes.items()} if trained else None
        layers.append(SparseLayer(store._replace(paged=stores[0].paged), index, spans, centroids, classifier, rotary))
    return layers


def in_order(index: torch.Tensor, lengths: Sequence[int], block: int, choice: Choice) -> torch.Tensor:
    """Sort buckets [B, Hkv, cap] in place, as a cache does those of a prompt; returns the spans of whole blocks."""
    for row, length in enumerate(lengths):
        begin = -(-choice.always.sink_tokens // block) * block
        end = max(0, length - choice.always.window_tokens - SPARE) // block * block
        index[row, :, begin:end] = index[row, :, begin:end].sort(-1).values
    blocks = index[:, :, : index.shape[2] // block * block].unflatten(-1, (-1, block))
    return torch.stack(blocks.aminmax(dim=-1), -1)


def select(layer: SparseLayer, q: torch.Tensor, k: torch.Tensor, probes: int, ops: LayerOps) -> torch.Tensor:
    """The buckets that a query visits; the bucket of the newest token of each row is found, too.

    q: [B, Hq, 1, D]; k: [B, Hkv, 1, D], both after rotary embedding.
    """
    grouped = q.unflatten(1, (layer.centroids.shape[0], -1)).transpose(2, 3)
    _, logits = ops.assign_and_score(k, grouped, layer.centroids, layer.classifier, rotary=layer.rotary)
    return ops.visit(logits, probes=probes)


def step(
    layer: SparseLayer, q: torch.Tensor, k: torch.Tensor, probes: int, choice: Choice, ops: LayerOps
) -> AttentionOutput:
    """All that a sparse layer does in a step except storing the token: index, selection, attention."""
    return attention(layer, q, select(layer, q, k, probes, ops), choice, ops)


def attention(
    layer: SparseLayer,
    q: torch.Tensor,
    visited: torch.Tensor,
    choice: Choice,
    ops: LayerOps,
    read: torch.Tensor | None = None,
) -> AttentionOutput:
    """The attention of a step alone."""
    return ops.sparse_decode(
        q,
        layer.store,
        Scoring(q.shape[3] ** -0.5),
        Visits(layer.index, visited, layer.spans),
        choice.always,
        read=read,
    )


def check_sparse(
    case: Case, q: torch.Tensor, layer: SparseLayer, visited: torch.Tensor, choice: Choice, got: AttentionOutput
) -> Check:
    """Check a sample as `check_heads` does, over the keys that its heads visit."""
    always = choice.always

    def kept(row: int, head: int) -> torch.Tensor:
        length = case.lengths[row]
        place, bucket = torch.arange(length, device=q.device), layer.index[row, head, :length].long()
        near = (place < always.sink_tokens) | (place >= length - always.window_tokens)
        return visited[row, head, 0][bucket] | near

    def reference(query: torch.Tensor, part: KVStore, row: int, head: int) -> AttentionOutput:
        at = (slice(row, row + 1), slice(head, head + 1))
        own = Visits(layer.index[at], visited[at])
        return reference_sparse_decode(query, part, Scoring(case.heads.dim**-0.5), own, always)

    return check_heads(case, q, layer.store, got, reference, kept)


def sparse_bytes(case: Case, width: str, share: float, choice: Choice) -> int:
    """Bytes that a step must read: codes and bucket numbers of what is kept, all spans, the weights of the selection.

    Steps, zeros and scales of blocks are not counted, nor what else lies in them: that depends on the buckets.
    """
    heads = case.heads
    line = sum(slots * heads.dim * sum(widths_of(each)) // 8 for each, slots in groups_of(width, heads.kv))
    kept = sum(min(n, choice.always.sink_tokens + choice.always.window_tokens + round(share * n)) for n in case.lengths)
    weights = choice.buckets * heads.dim
    if choice.selector == "saap":
        weights += heads.dim * choice.hidden + choice.hidden * choice.buckets
    spans = sum(n // BLOCK for n in case.lengths)
    return kept * (line + 2 * heads.kv) + heads.kv * (4 * spans + 2 * weights)


def bucket_steps(case: Case, width: str, q: torch.Tensor, choice: Choice, how: Conditions) -> list[Found]:
    """The rows of a choice's shares of the buckets with their checks, and what to time if the results are right."""
    device, found = how.device, list[Found]()
    ops = how.ops(q, groups_of(width, case.heads.kv))
    k = draw(torch.Generator(device).manual_seed(how.seed + 2), len(q), case.heads.kv, 1, case.heads.dim)
    sizes = {share: sparse_bytes(case, width, share, choice) for share in choice.shares}
    layers = make_layers(case, width, choice, cold_copies(min(sizes.values()), device), device, how.seed + 1)
    there = sum(case.lengths) * case.heads.kv
    for share in choice.shares:
        how.tell(f"{case}: {width} bit, {choice.selector}, {share:.2%} of the buckets")
        probes, read = max(1, round(share * choice.buckets)), torch.zeros(1, dtype=torch.int64, device=device)

        def prepare(probes: int = probes, read: torch.Tensor = read) -> Prepared:
            visited = select(layers[0], q, k, probes, ops)
            attention(layers[0], q, visited, choice, ops, read)
            calls: list[Callable[[], AttentionOutput]] = [
                partial(step, each, q, k, probes, choice, ops) for each in layers
            ]
            return calls, partial(check_sparse, case, q, layers[0], visited, choice)

        row, rotation = our_step(case, f"{width} bit, {choice.selector}, {share:.2%}", sizes[share], device, prepare)
        if rotation is not None:
            kept = f"{int(read) / there:.2%} of the keys, always-read ones included"
            row = replace(row, note=f"{probes} of {choice.buckets} buckets, {kept}")
        found.append((row, rotation))
    return found
