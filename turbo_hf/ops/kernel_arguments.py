"""What launches give to kernels that read or write the cache, by what belongs together."""

from typing import Any, NamedTuple

from turbo_hf.layout import KVStore


class Cache(NamedTuple):
    """Keys and values of one layer, as in `KVStore`.

    paged: for each bit width (k, v, meta, scale), as in `PagedHeads`. opened: (k, v, k_scale, v_scale) of the open
    tokens. cap: open tokens that there is room for.
    """

    paged: Any
    opened: Any
    cap: int


def cache_of(store: KVStore) -> Cache:
    """What kernels are given of a layer's keys and values."""
    opened = (store.k_open, store.v_open, store.k_scale, store.v_scale)
    return Cache(tuple(pages[1:] for pages in store.paged), opened, store.k_open.shape[2])


class Rows(NamedTuple):
    """order: int64 [B, Hkv], the KV head in each slot. Of each row, int64 [B]: sealed blocks, open tokens, and the
    first column of the queries that holds a token, or None: all do."""

    order: Any
    sealed: Any
    open_len: Any
    starts: Any
