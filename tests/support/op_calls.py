"""Calls of ops whose options are keywords, as tests vary them one by one, and not the tuples that ops take."""

from typing import Any

from torch import Tensor

from turbo_hf.layout import AlwaysRead, AttentionOutput, KVStore, Operands, Rounding, Scoring, Visits
from turbo_hf.ops.decode import contract as decode_op
from turbo_hf.ops.prefill import contract as prefill_op
from turbo_hf.ops.prefill import operands
from turbo_hf.ops.sparse import decode as sparse_op


def taken(kind: Any, options: dict[str, Any]) -> Any:
    """The tuple of this kind, whose fields leave `options`."""
    return kind(**{name: options.pop(name) for name in kind._fields if name in options})


def prefill(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionOutput:
    """`ops.prefill`."""
    return prefill_op.prefill(q, k, v, taken(Scoring, options), taken(Rounding, options), **options)


def quantize_operands(k: Tensor, v: Tensor, **options: Any) -> Operands:
    """`ops.prefill.operands.quantize_operands`."""
    return operands.quantize_operands(k, v, taken(Rounding, options), **options)


def decode(q: Tensor, store: KVStore, **options: Any) -> AttentionOutput:
    """`ops.decode`."""
    return decode_op.decode(q, store, taken(Scoring, options), **options)


def sparse_decode(
    q: Tensor, store: KVStore, buckets: Tensor | None, visited: Tensor | None, **options: Any
) -> AttentionOutput:
    """`ops.sparse_decode`; buckets and visited: both or neither."""
    scoring, always = taken(Scoring, options), taken(AlwaysRead, options)
    visits = taken(Visits, options | {"buckets": buckets, "visited": visited})
    options = {name: x for name, x in options.items() if name not in Visits._fields}
    return sparse_op.sparse_decode(q, store, scoring, None if buckets is None else visits, always, **options)
