"""What launches give to kernels that read or write the cache, by what belongs together."""

from typing import Any, NamedTuple

from turbo_hf.layout import KVStore


class Cache(NamedTuple):
    """Keys and values of one layer, as in `KVStore`.

    paged: (k, v, meta, size) for each bit width, as in `PagedHeads`.
    opened: (k, v, k_scale, v_scale) of the open tokens.
    cap: capacity of the open buffer in tokens.
    """

    paged: Any
    opened: Any
    cap: int


def cache_of(store: KVStore) -> Cache:
    """A layer's keys and values as kernels take them."""
    opened = (store.k_open, store.v_open, store.k_scale, store.v_scale)
    return Cache(tuple(pages[1:] for pages in store.paged), opened, store.k_open.shape[2])


class Rows(NamedTuple):
    """What kernels need of each row.

    order: int64 [B, Hkv], the KV head in each slot.
    sealed, open_len: int64 [B], sealed blocks and open tokens.
    starts: int64 [B], the first column of the queries that holds a token; None: all columns do.
    """

    order: Any
    sealed: Any
    open_len: Any
    starts: Any
