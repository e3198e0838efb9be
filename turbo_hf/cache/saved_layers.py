"""What a layer of a cache holds, as a tree of plain values and tensors, and a new layer that holds it."""

from collections.abc import Iterable
from typing import Any

import torch

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.open_buffer import OpenBuffer
from turbo_hf.cache.rows import RowState
from turbo_hf.layout import PagedHeads, PageMeans, empty_means, empty_pages, widths_of

LATER = frozenset({"dtype", "device", "indexer_dtype", "indexer_device"})
"""Attributes that Transformers' own layers have once they hold something."""


def held_by(layer: Any) -> Any:
    """All that a layer holds; None of a compressed layer without tokens."""
    if not isinstance(layer, TurboLayer):
        return dict(vars(layer))
    if not layer.is_initialized:
        return None
    state, (pages, means, table) = layer.state, layer.pool.kept(layer.state.sealed)
    like = OpenBuffer(layer.rows, 1, 1, torch.device("meta"), tokens=max(state.open))
    # without the room for tokens to come
    opened = [x.narrow(d, 0, like.capacity) for x, d in zip(layer.buffer.tensors(), (2, 3, 2, 2), strict=True)]
    return {
        "shape": [layer.heads, layer.dim, layer.rotary_dim],
        "dtype": layer.dtype,
        "state": state._asdict(),
        "order": layer.order,
        "ranked": layer.ranked,
        "valid": layer.valid_prefix,
        "universal": layer.universal,
        "left_by_head": layer.left_by_head,
        "pages": pages,
        "means": means,
        "table": table,
        "open": opened,
        "index": layer.bucket_index.kept(max(layer.lengths())),
    }


def hold(layer: Any, held: Any, device: torch.device) -> None:
    """Give a new layer what `held_by` returned of another one of its kind.

    Raises:
        ValueError: it does not fit the layer.
    """
    if not isinstance(layer, TurboLayer):
        unknown = held.keys() - vars(layer).keys() - LATER
        if unknown:
            raise ValueError(f"a {type(layer).__name__} has no {', '.join(sorted(unknown))}")
        vars(layer).update(held)
    elif held is not None:
        _hold(layer, held, device)


def _hold(layer: TurboLayer, held: dict[str, Any], device: torch.device) -> None:
    (heads, dim, rotary), state = held["shape"], RowState(**held["state"])
    rows, block, meta = len(state.open), layer.config.block_size, torch.device("meta")
    lists = (state.sealed, state.open, state.dropped, state.turn_start, held["ranked"])
    if state.block != block or {len(each) for each in lists} != {rows}:
        raise ValueError("its rows contradict each other")
    channels = (dim, rotary or dim)
    layer.lazy_initialization(*(torch.empty(rows, heads, 0, n, dtype=held["dtype"], device=device) for n in channels))
    pool, groups = layer.pool, layer.pool.groups
    pages = tuple(PagedHeads(widths_of(width)[0], *own) for (width, _), own in zip(groups, held["pages"], strict=True))
    count = len(pages[0].k)
    shape = (dim, block, meta, pool.dtype_16bit, rotary)
    # of a layer that keeps them
    means = held.get("means", [])
    like: dict[str, Iterable[torch.Tensor]] = {
        "pages": [x for width, n in groups for x in empty_pages(width, count, n, *shape)[1:]],
        "means": [] if pool.means is None else empty_means(count, heads, dim, meta),
        "open": OpenBuffer(rows, heads, dim, meta, layer.buffer.k.dtype, max(state.open), rotary).tensors(),
        "order": [layer.order],
        "universal": [] if layer.universal is None else [layer.universal],
        "left_by_head": [] if layer.left_by_head is None else [layer.left_by_head],
    }
    own = {
        "pages": [x for each in pages for x in each[1:]],
        "means": means,
        "open": held["open"],
        "order": [held["order"]],
        "universal": [] if held["universal"] is None else [held["universal"]],
        # of a layer that keeps means; a cache saved before audits has none
        "left_by_head": [x for x in (held.get("left_by_head", layer.left_by_head),) if x is not None],
    }
    for name, wanted in like.items():
        if [(x.shape, x.dtype) for x in own[name]] != [(x.shape, x.dtype) for x in wanted]:
            raise ValueError(f"its {name} have other shapes than its rows")
    valid, table = held["valid"], held["table"].cpu()
    if valid is not None and (valid.dtype != torch.bool or len(valid) != rows or valid.shape[1] > state.seen):
        raise ValueError("its padding has another shape than its rows")
    if table.shape != (rows, max(state.sealed)) or bool(((table < 0) | (table >= max(1, count))).any()):
        raise ValueError("its table names pages that it does not have")
    layer.state, layer.ranked, layer.valid_prefix = state, held["ranked"], valid
    layer.order, layer.universal = held["order"], held["universal"]
    layer.left_by_head = next(iter(own["left_by_head"]), None)
    layer.buffer.k, layer.buffer.v, layer.buffer.k_scale, layer.buffer.v_scale = held["open"]
    pool.hold(pages, table, state.sealed, PageMeans(*means) if means else None)
    layer.bucket_index.hold(held["index"], max(layer.lengths()))
