"""Calls of ops whose backend and options are keywords, as tests vary them one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turbo_hf.layout import (
    AlwaysRead,
    AttentionOutput,
    KVStore,
    Operands,
    PagedHeads,
    Rotary,
    Rounding,
    Scoring,
    Visits,
    Width,
    empty_pages,
)
from turbo_hf.ops.layer_ops import LayerOps
from turbo_hf.ops.prefill.reference import reference_quantize_operands
from turbo_hf.ops.store.reference import reference_quantize_tokens, reference_seal_blocks


def ops_like(x: Tensor, backend: str = "auto", store: KVStore | None = None, **options: Any) -> LayerOps:
    """The ops of a layer whose keys are like x [..., D]. store: its cache."""
    if store is not None:
        dim, channels = store.k_open.shape[3], store.v_open.shape[2]
        bits = max((pages.bits for pages in store.paged), default=4)
        options |= {"block": store.block, "bits": bits, "rotary_dim": None if dim == channels else channels}
    return LayerOps(backend, x.device, x.dtype, x.shape[-1], **options)


def taken(kind: Any, options: dict[str, Any]) -> Any:
    """The tuple of this kind, whose fields leave `options`."""
    return kind(**{name: options.pop(name) for name in kind._fields if name in options})


def append_tokens(k: Tensor, v: Tensor, store: KVStore, *, backend: str = "auto", **options: Any) -> Tensor | None:
    """`StoreOps.append_tokens`."""
    return ops_like(k, backend, store).append_tokens(k, v, store, **options)


def append_step(k: Tensor, v: Tensor, store: KVStore, *, backend: str = "auto", **options: Any) -> Tensor | None:
    """`StoreOps.append_step`."""
    return ops_like(k, backend, store).append_step(k, v, store, **options)


def seal_open(store: KVStore, blocks: int, *, moves: bool = False, backend: str = "auto") -> None:
    """`StoreOps.seal_open`, of a layer of keys in 16 bit."""
    ops_like(store.k_open[0, 0, :1].half(), backend, store).seal_open(store, blocks, moves)


def quantize_tokens(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """`reference_quantize_tokens`, or what the kernel of `append_tokens` makes of these tokens."""
    if not ops_like(x, backend).store_kernels:
        return reference_quantize_tokens(x)
    batch, heads, count, dim = x.shape
    k, v = (x.new_zeros(batch, heads, *shape, dtype=torch.int8) for shape in ((count, dim), (dim, count)))
    k_scale, v_scale = x.new_zeros(2, batch, heads, count, dtype=torch.float32)
    row = x.new_zeros(batch, dtype=torch.int64)
    store = KVStore((), row[:, None], row[:, None], row, k, v, k_scale, v_scale, row.clone(), 64)
    append_tokens(x, x, store, nonfinite=x.new_zeros(1, dtype=torch.int32), backend=backend)
    return k, k_scale


def seal_blocks(
    k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, width: Width, backend: str = "auto"
) -> PagedHeads:
    """`reference_seal_blocks`, or what `seal_open` makes of these blocks as rows of a cache."""
    if not ops_like(k, backend).store_kernels:
        return reference_seal_blocks(k, k_scale, v, v_scale, width)
    pages, heads, block, dim = k.shape
    held = empty_pages(width, pages, heads, dim, block, k.device, k.dtype)
    order, row = torch.arange(heads, device=k.device).expand(pages, heads), torch.arange(pages, device=k.device)
    opened = (k.contiguous(), v.mT.contiguous(), k_scale.contiguous(), v_scale.contiguous())
    one = torch.ones_like(row)
    seal_open(KVStore((held,), order, row[:, None], one, *opened, one * block, block), 1, backend=backend)
    return held


def exchange_open(blocks: Any, slots: Any, *at: Any, backend: str = "auto") -> None:
    """`StoreOps.exchange_open`."""
    ops_like(blocks[2], backend).exchange_open(blocks, slots, *at)


def select_rows(tensors: Sequence[Tensor], rows: Sequence[int], *, backend: str = "auto") -> None:
    """`StoreOps.select_rows`."""
    ops_like(torch.empty(16, device=tensors[0].device if tensors else None), backend).select_rows(tensors, rows)


def prefill(q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", **options: Any) -> AttentionOutput:
    """`PrefillOps.prefill`."""
    scoring, rounding = taken(Scoring, options), taken(Rounding, options)
    return ops_like(q, backend).prefill(q, k, v, scoring, rounding, **options)


def quantize_operands(k: Tensor, v: Tensor, *, backend: str = "auto", **options: Any) -> Operands:
    """`reference_quantize_operands`, or its kernel."""
    rounding, starts = taken(Rounding, options), options.get("starts")
    if not ops_like(k, backend).prompt_kernels(rounding.mode):
        return reference_quantize_operands(k, v, rounding, starts)
    from turbo_hf.ops.prefill.launch import launch_quantize_operands  # noqa: PLC0415 - needs Triton

    return launch_quantize_operands(k, v, rounding, starts)[0]


def decode(q: Tensor, store: KVStore, *, mode: str = "turbo", backend: str = "auto", **options: Any) -> AttentionOutput:
    """`DecodeOps.decode`."""
    return ops_like(q, backend, store, mode=mode).decode(q, store, taken(Scoring, options), **options)


def latent_decode(
    q_latent: Tensor, q_rotary: Tensor, store: KVStore, scaling: float, *, backend: str = "auto", **options: Any
) -> AttentionOutput:
    """`LatentOps.latent_decode`."""
    return ops_like(q_latent, backend, store).latent_decode(q_latent, q_rotary, store, scaling, **options)


def named_decode(q_latent: Tensor, q_rotary: Tensor, store: KVStore, *given: Any, backend: str = "auto") -> Tensor:
    """`LatentOps.named_decode`."""
    return ops_like(q_latent, backend, store).named_decode(q_latent, q_rotary, store, *given)


def sparse_decode(
    q: Tensor, store: KVStore, buckets: Tensor | None, visited: Tensor | None, *, mode: str = "turbo",
    backend: str = "auto", **options: Any,
) -> AttentionOutput:  # fmt: skip
    """`SparseOps.sparse_decode`; buckets and visited: both or neither."""
    scoring, always = taken(Scoring, options), taken(AlwaysRead, options)
    visits = taken(Visits, options | {"buckets": buckets, "visited": visited})
    options = {name: x for name, x in options.items() if name not in Visits._fields}
    ops = ops_like(q, backend, store, mode=mode)
    return ops.sparse_decode(q, store, scoring, None if buckets is None else visits, always, **options)


def assign(keys: Tensor, centroids: Tensor, *, rotary: Rotary | None = None, backend: str = "auto") -> Tensor:
    """`SparseOps.assign`."""
    return ops_like(keys, backend).assign(keys, centroids, rotary=rotary)


def assign_and_score(
    keys: Tensor, queries: Tensor, centroids: Tensor, classifier: Mapping[str, Tensor] | None = None, *,
    rotary: Rotary | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`SparseOps.assign_and_score`."""
    return ops_like(keys, backend).assign_and_score(keys, queries, centroids, classifier, rotary=rotary)


def score(queries: Tensor, centroids: Tensor, **options: Any) -> Tensor:
    """The logits of `assign_and_score`, without a classifier."""
    return assign_and_score(queries[:, :, :, 0], queries, centroids, **options)[1]


def classify(queries: Tensor, classifier: Mapping[str, Tensor], **options: Any) -> Tensor:
    """The logits of `assign_and_score`, with a classifier."""
    (heads, dim, _), buckets = classifier["weight_1"].shape, classifier["bias_2"].shape[1]
    centroids = classifier["weight_1"].new_zeros(heads, buckets, dim)
    return assign_and_score(queries[:, :, :, 0], queries, centroids, classifier, **options)[1]


def visit(logits: Tensor, *, probes: int, backend: str = "auto") -> Tensor:
    """`SparseOps.visit`."""
    return ops_like(logits.new_empty(16), backend).visit(logits, probes=probes)
