"""What launches give to the kernels of sparse decode beside what those of decode get."""

from typing import Any, NamedTuple


class Index(NamedTuple):
    """The buckets of a layer.

    buckets: int16 [B, Hkv, cap], the bucket of each token.
    visited: uint8 [B, Hkv, M, clusters], whether each query visits each bucket.
    clusters: buckets per KV head.
    """

    buckets: Any
    visited: Any
    clusters: int


class Lists(NamedTuple):
    """What `list_kernel` leaves: blocks int64 [lists, capacity], page << 32 | number; counts int32 [lists]."""

    blocks: Any
    counts: Any
