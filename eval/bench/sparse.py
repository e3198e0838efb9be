"""`turbo-hf bench sparse`: speed of a sparse decode step, including selection and index.

It is compared with FP16 attention over all keys, and with a dense step over the same cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.console import Device, Json, mistakes_end_the_command, out
from turbo_hf.eval.bench.check import Check, poisoned
from turbo_hf.eval.bench.checked_rows import checked
from turbo_hf.eval.bench.decode import (
    DecodeRow,
    Found,
    begin_decode,
    beside_fp16,
    check_heads,
    dense_step,
    end_decode,
    new_row,
    print_case,
)
from turbo_hf.eval.bench.decode_cases import BLOCK, DECODE_SHAPES, LATENT_SHAPES, WIDTHS, Case, groups_of, make_case
from turbo_hf.eval.bench.graph_rotation import Rotation, cold_copies
from turbo_hf.eval.bench.options import Backend, Folder, Seed, find_device, one_of, prepare_folder, require_choice
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.random_cache import draw, one_head, packed_stores
from turbo_hf.eval.bench.sparse_means import means_steps
from turbo_hf.eval.bench.timing import Call, Conditions, Stopwatch
from turbo_hf.layout import AlwaysRead, AttentionOutput, KVStore, Rotary, Scoring, Visits, widths_of
from turbo_hf.ops.sparse.decode import sparse_decode
from turbo_hf.ops.sparse.reference import reference_sparse_decode
from turbo_hf.ops.sparse.select import assign_and_score, classify, score, visit
from turbo_hf.ops.store.quantize import dequantize
from turbo_hf.sparse.bucket_index import SPARE

SELECTORS = ("saap", "kmeans", "kmeans-rotated")
"""What chooses the buckets: the query classifier, or centroids, of keys before or after rotary embedding."""

MEANS = "means"
"""The selector that chooses whole blocks by their mean keys (`turbo_hf.eval.bench.sparse_means`)."""

SPARSE_SHAPES = tuple(shape for shape in DECODE_SHAPES if shape not in LATENT_SHAPES)

SIZES = ("1x32k", "1x131k", "1x524k")
SHARES = (0.01, 0.02, 0.04, 0.08)

NO_INDEX = ", no index"
"""The row of a step that does not look up the bucket of its new token: the difference is the cost of indexing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is visited.

    buckets: of each KV head.
    hidden: units of the classifier.
    sink, window: tokens that are always read.
    selector: of SELECTORS, or MEANS.
    """

    buckets: int = 1024
    hidden: int = 1024
    sink: int = 1
    window: int = 2047
    selector: str = "saap"


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
        begin = -(-choice.sink // block) * block
        end = max(0, length - choice.window - SPARE) // block * block
        index[row, :, begin:end] = index[row, :, begin:end].sort(-1).values
    blocks = index[:, :, : index.shape[2] // block * block].unflatten(-1, (-1, block))
    return torch.stack(blocks.aminmax(dim=-1), -1)


def select(layer: SparseLayer, q: torch.Tensor, k: torch.Tensor | None, probes: int, backend: str) -> torch.Tensor:
    """The buckets that a query visits; of the newest token of each row, the bucket is found too.

    q: [B, Hq, 1, D]; k: [B, Hkv, 1, D], both after rotary embedding; None: its bucket is not asked for.
    """
    grouped = q.unflatten(1, (layer.centroids.shape[0], -1)).transpose(2, 3)
    how: dict[str, Any] = {"rotary": layer.rotary, "backend": backend}
    if k is not None:
        _, logits = assign_and_score(k, grouped, layer.centroids, layer.classifier, **how)
    elif layer.classifier is None:
        logits = score(grouped, layer.centroids, **how)
    else:
        logits = classify(grouped, layer.classifier, **how)
    return visit(logits, probes=probes, backend=backend)


def step(
    layer: SparseLayer, q: torch.Tensor, k: torch.Tensor | None, probes: int, choice: Choice, backend: str
) -> AttentionOutput:
    """All that a sparse layer does in a step except storing the token: index, selection, attention."""
    return attention(layer, q, select(layer, q, k, probes, backend), choice, backend)


def attention(
    layer: SparseLayer,
    q: torch.Tensor,
    visited: torch.Tensor,
    choice: Choice,
    backend: str,
    read: torch.Tensor | None = None,
) -> AttentionOutput:
    """The attention of a step alone."""
    return sparse_decode(
        q,
        layer.store,
        Scoring(q.shape[3] ** -0.5),
        Visits(layer.index, visited, layer.spans),
        AlwaysRead(choice.sink, choice.window),
        read=read,
        backend=backend,
    )


def check_sparse(
    case: Case, q: torch.Tensor, layer: SparseLayer, visited: torch.Tensor, choice: Choice, got: AttentionOutput
) -> Check:
    """Check a sample against float64 over the keys that its heads visit, as `check_heads` does."""

    def attended(row: int, head: int, query: torch.Tensor) -> tuple[AttentionOutput, AttentionOutput]:
        part, scaling, length = one_head(layer.store, row, head), case.heads.dim**-0.5, case.lengths[row]
        bucket, visits = layer.index[row, head, :length], visited[row, head, 0]
        place = torch.arange(length, device=q.device)
        kept = visits[bucket.long()] | (place < choice.sink) | (place >= length - choice.window)
        k, v = (x[0, :, :length][:, kept] for x in dequantize(part, torch.float64))
        exact = attend(query[0], k, v, scaling=scaling, causal=False)
        at = (slice(row, row + 1), slice(head, head + 1))
        own, always = Visits(layer.index[at], visited[at]), AlwaysRead(choice.sink, choice.window)
        return reference_sparse_decode(query, part, Scoring(scaling), own, always), exact

    return check_heads(case, q, got, attended)


def run_case(
    case: Case,
    width: str,
    shares: list[float],
    choices: list[Choice],
    how: Conditions,
    copy: float,
) -> list[DecodeRow]:
    """Check, then time a sparse step of each choice at each share of buckets or blocks, the dense step and FP16.

    width: of `decode_cases.WIDTHS`. copy: as in `decode.run_case`. Returns FP16, the dense step over the same width, a
    sparse step for each selector and share, of buckets with the index of its token and without.
    """
    heads = case.heads
    generator = torch.Generator(how.device).manual_seed(how.seed)
    # in float32, then rounded: other numbers than those drawn in float16
    q, k = (draw(generator, len(case.lengths), n, 1, heads.dim, dtype=torch.float32).half() for n in heads[:2])
    how.tell(f"{case}: {width} bit, all keys")
    found = [dense_step(case, width, q, how)]
    for choice in choices:
        if choice.selector == MEANS:
            found += means_steps(case, width, shares, q, AlwaysRead(choice.sink, choice.window), how)
        else:
            found += _bucket_steps(case, width, shares, q, k, choice, how)
    return beside_fp16(case, q, generator, found, how, copy)


def _bucket_steps(
    case: Case, width: str, shares: list[float], q: torch.Tensor, k: torch.Tensor, choice: Choice, how: Conditions
) -> list[Found]:
    """The rows of these shares of the buckets with their checks, and what to time if the results are right."""
    device, backend, found = how.device, how.backend, list[Found]()
    sizes = {share: sparse_bytes(case, width, share, choice) for share in shares}
    layers = make_layers(case, width, choice, cold_copies(min(sizes.values()), device), device, how.seed + 1)
    for share in shares:
        how.tell(f"{case}: {width} bit, {choice.selector}, {share:.2%} of the buckets")
        row, rotation = _sparse(case, width, share, layers, q, k, choice, backend, sizes[share])
        found.append((row, rotation))
        if rotation is not None:
            calls: list[Call] = [
                partial(step, each, q, None, _probes(share, choice), choice, backend) for each in layers
            ]
            found.append((replace(row, method=row.method + NO_INDEX, note=""), Rotation(calls, device)))
    return found


def sparse_bytes(case: Case, width: str, share: float, choice: Choice) -> int:
    """Bytes that a step must read: codes and bucket numbers of what is kept, all spans, the weights of the selection.

    Steps, zeros and scales of blocks are not counted, nor what else lies in them: that depends on the buckets.
    """
    heads = case.heads
    line = sum(slots * heads.dim * sum(widths_of(each)) // 8 for each, slots in groups_of(width, heads.kv))
    kept = sum(min(n, choice.sink + choice.window + round(share * n)) for n in case.lengths)
    weights = choice.buckets * heads.dim
    if choice.selector == "saap":
        weights += heads.dim * choice.hidden + choice.hidden * choice.buckets
    spans = sum(n // BLOCK for n in case.lengths)
    return kept * (line + 2 * heads.kv) + heads.kv * (4 * spans + 2 * weights)


def _probes(share: float, choice: Choice) -> int:
    return max(1, round(share * choice.buckets))


def _sparse(
    case: Case,
    width: str,
    share: float,
    layers: list[SparseLayer],
    q: torch.Tensor,
    k: torch.Tensor,
    choice: Choice,
    backend: str,
    size: int,
) -> Found:
    """The row of one share with its check, and what to time if the result is right."""
    probes = _probes(share, choice)
    read = torch.zeros(1, dtype=torch.int64, device=q.device)

    def prepare() -> tuple[Check, Callable[[], Rotation]]:
        layer = layers[0]
        with poisoned():
            visited = select(layer, q, k, probes, backend)
            got = attention(layer, q, visited, choice, backend, read)
        check = check_sparse(case, q, layer, visited, choice, got)
        calls: list[Call] = [partial(step, each, q, k, probes, choice, backend) for each in layers]
        return check, lambda: Rotation(calls, q.device)

    row, rotation = checked(new_row(case, f"{width} bit, {choice.selector}, {share:.2%}", True, size), prepare)
    if rotation is None:
        return row, None
    there = sum(case.lengths) * case.heads.kv
    note = f"{probes} of {choice.buckets} buckets, {int(read) / there:.2%} of the keys, always-read ones included"
    return replace(row, note=note), rotation


def sparse_command(
    shape: Annotated[str, typer.Option(help=f"Heads of {', '.join(SPARSE_SHAPES)}.")] = "llama3-8b",
    size: Annotated[list[str] | None, typer.Option(help="Rows x tokens, such as 1x131k; may be repeated.")] = None,
    width: Annotated[str, typer.Option(help=f"Bits: {', '.join(WIDTHS)}.")] = "4",
    share: Annotated[
        list[float] | None, typer.Option(help="Share of the buckets or blocks that are read, 0 to 1; may be repeated.")
    ] = None,
    selector: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join((*SELECTORS, MEANS))}; may be repeated. Default: saap.")
    ] = None,
    buckets: Annotated[int, typer.Option(min=2, max=8192, help="Buckets per KV head.")] = 1024,
    hidden: Annotated[int, typer.Option(min=1, help="Units of the query classifier.")] = 1024,
    window: Annotated[int, typer.Option(min=1, help="Newest tokens, which are always read.")] = 2047,
    backend: Backend = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Approximate seconds per case, in 5 to 100 rounds.")] = 1.0,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """One sparse decode step against a dense one and FP16: index, selection and attention, checked first, then timed.

    Keys are assigned to buckets at random, and stored in bucket order as those of a prompt are; with selector "means",
    means are such that the blocks chosen lie at random. Exits with 1 if a result is wrong, which is then not timed.
    """
    with mistakes_end_the_command():
        one_of("shape", shape, SPARSE_SHAPES)
        one_of("width", width, WIDTHS)
        selectors = selector or list(SELECTORS[:1])
        for name in selectors:
            one_of("selector", name, (*SELECTORS, MEANS))
        one_of("backend", backend, BACKENDS)
        shares = share or list(SHARES)
        if not all(0 < x <= 1 for x in shares):
            raise ValueError(f"a share must be above 0 and at most 1; got {shares}.")
        cases = [make_case(shape, name, False, seed) for name in size or SIZES]
        stopwatch = Stopwatch(find_device(device))
        require_choice(stopwatch.device, bool(size), "--size 1x4k, or less")
        prepare_folder(folder)
    choice = Choice(buckets, hidden, 1, window)
    bench, copy = begin_decode("sparse", stopwatch, folder)
    how = Conditions(stopwatch, backend, seed, seconds)

    def show(case: Case, rows: Sequence[DecodeRow]) -> None:
        print_case(case, rows)
        for line in index_shares(rows):
            out.print(line, highlight=False)

    bench.each(
        cases,
        lambda case, tell: run_case(
            case, width, shares, [replace(choice, selector=name) for name in selectors], how._replace(tell=tell), copy
        ),
        show,
        options={**how.given, "width": width, "shares": shares, **asdict(choice), "selector": selectors},
        copy_tb_s=copy,
    )
    end_decode(bench, stopwatch, json_line)


def index_shares(rows: Sequence[DecodeRow]) -> list[str]:
    """The share of each sparse step that finding the bucket of the new token takes."""
    us = {row.method: row.us for row in rows}
    lines = []
    for method, whole in us.items():
        without = us.get(method + NO_INDEX)
        if whole and without:
            lines.append(f"{method}: indexing the new token is {1 - without / whole:.1%} of the step.")
    return lines
