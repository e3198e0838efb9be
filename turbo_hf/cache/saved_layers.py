"""What a layer of a cache holds, as a tree of values and tensors; what such a tree must be; a layer made of it."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from turbo_hf.cache.index_keys import IndexKeys
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.page_pool import OpenBuffer
from turbo_hf.cache.rows import RowState
from turbo_hf.config.expected import FINITE, FLOATS, Each, OneOf, Stored, Whole, require
from turbo_hf.errors import Unsupported
from turbo_hf.layout import (
    HEAD_DIM_MULTIPLE,
    INT8_MAX,
    UNQUANTIZED,
    PagedHeads,
    Width,
    empty_pages,
    type_16bit,
    widths_of,
)
from turbo_hf.sparse.bucket_index import GRAIN
from turbo_hf.sparse.selectors import Centroids, Selector

META = torch.device("meta")
FLAGS = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}
Ends = tuple[float | None, float | None]
CODES: Ends = (-INT8_MAX, INT8_MAX)


def held_by(layer: Any) -> Any:
    """All that a layer holds.

    Raises:
        Unsupported: a compressed layer without tokens.
    """
    if not isinstance(layer, TurboLayer):
        return {name: x for name, x in vars(layer).items() if name != "device"}
    if not layer.is_initialized:
        raise Unsupported(f"layer {layer.index} holds no tokens, and others do: such a cache is not saved.")
    state, (pages, table) = layer.state, layer.pool.kept(layer.state.sealed)
    like = OpenBuffer(layer.rows, 1, 1, META, tokens=max(state.open))
    # without the room for tokens to come
    opened = [
        _until(x.narrow(d, 0, like.capacity), state.open, d, fill)
        for x, d, fill in zip(layer.buffer.tensors(), (2, 3, 2, 2), (0, 0, 1, 1), strict=True)
    ]
    index = layer.bucket_index.kept(max(layer.lengths()))
    return {
        "dtype": layer.dtype,
        "state": state._asdict(),
        "valid": layer.valid_prefix,
        "pages": pages,
        "table": table,
        "open": opened,
        "index": index | {"buckets": _until(index["buckets"], layer.lengths(), 2, 0)},
        "index_keys": None if layer.index_keys is None else layer.index_keys.kept[:, : layer.seen].clone(),
    }


def _until(x: torch.Tensor, counts: Sequence[int], dim: int, fill: int) -> torch.Tensor:
    """A copy with `fill` in row r from place `counts[r]` of `dim` on, where memory holds anything."""
    places = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - dim - 1))
    return torch.where(places < torch.tensor(counts, device=x.device).view(-1, *[1] * (x.dim() - 1)), x, fill)


def require_layer(layer: Any, held: Any, rows: int, columns: int) -> None:
    """ValueError unless a new layer can hold what `held_by` returned of another one.

    rows, columns: of the cache. Tensors of the meta device have no numbers, and their shapes alone are compared.
    """
    if not isinstance(layer, TurboLayer):
        require(held, dict, "")
        require(held, _of_other(layer, held, rows, columns), "")
        return
    require(held, _counts(layer, rows, columns), "")
    require(held, _of_turbo(layer, held, rows), "")
    if not held["table"].is_meta:
        _require_numbers(layer, held, columns)


def _counts(layer: TurboLayer, rows: int, columns: int) -> dict[str, Any]:
    """What a saved compressed layer consists of, and what its numbers must be by themselves."""
    block, codes = layer.config.expert.block_size, (rows, None, None, None)
    tokens, blocks = [Whole(0, columns)] * rows, [Whole(0, columns // block)] * rows
    kept = layer.state.recent, layer.state.first
    state: Any = (block, blocks, tokens, tokens, tokens, columns, bool, False, *kept)
    opened = OneOf((Stored(codes, torch.int8), Stored(codes, None)))
    return {
        "valid": object,
        "dtype": OneOf(FLOATS),
        "state": RowState(*state)._asdict(),
        "pages": Each([torch.Tensor] * 4),
        "table": torch.Tensor,
        "open": [opened, opened, torch.Tensor, torch.Tensor],
        "index": dict,
        "index_keys": object,
    }


def _of_turbo(layer: TurboLayer, held: dict[str, Any], rows: int) -> dict[str, Any]:
    """What a saved compressed layer must be, by what `_counts` has found right."""
    config, dtype, state, opened = layer.config, held["dtype"], RowState(**held["state"]), held["open"]
    block, (heads, dim), lengths = config.expert.block_size, opened[0].shape[1::2], state.lengths()
    rotary = opened[1].shape[2] if layer.latent else None
    if not heads or not dim or dim % HEAD_DIM_MULTIPLE or (rotary or HEAD_DIM_MULTIPLE) % HEAD_DIM_MULTIPLE:
        raise ValueError(f"it has {heads} heads of {dim} channels; heads have a multiple of {HEAD_DIM_MULTIPLE}")
    groups, half, pages = config.head_groups(heads), type_16bit(dtype), held["pages"]
    wide, count = UNQUANTIZED in dict(groups), next((len(x) for each in pages for x in each if x.dim()), 0)
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max / INT8_MAX)

    def like(x: torch.Tensor, ends: Ends = (None, None)) -> Stored:
        return Stored(tuple(x.shape), x.dtype, *(FINITE if x.is_floating_point() and ends == (None, None) else ends))

    def page(width: Width, slots: int) -> list[Stored]:
        _, k, v, meta, size = empty_pages(width, count, slots, dim, block, META, half, rotary)
        codes = [like(x, CODES) if x.dtype == torch.int8 else like(x) for x in (k, v)]
        return [*codes, like(meta), like(size, (0, largest))]

    buffer = OpenBuffer(rows, heads, dim, META, half if wide else torch.int8, max(state.open), rotary)
    in_open: list[Ends] = [(None, None) if wide else CODES] * 2 + [(1, 1) if wide else (0, largest)] * 2
    by_head = (rows, heads)
    shape = (rows, state.seen, None)
    keys = Stored(shape, None, *FINITE) if wide else Stored(shape, torch.uint8)
    return {
        "dtype": dtype,
        "state": held["state"],
        "valid": OneOf((None, Stored((rows, None), torch.bool))),
        "pages": [page(*group) for group in groups],
        "table": Stored((rows, max(state.sealed)), torch.int64, 0, max(0, count - 1)),
        "open": [like(x, ends) for x, ends in zip(buffer.tensors(), in_open, strict=True)],
        "index": _of_index(layer.selector, held["index"], by_head, lengths, block),
        "index_keys": OneOf((None, keys)) if layer.latent else None,
    }


def _of_index(
    by: Selector | None, found: dict[str, Any], by_head: tuple[int, int], lengths: list[int], block: int
) -> dict[str, Any]:
    """What the `BucketIndex` of a saved layer with this selector must be."""
    choices = by.choices if isinstance(by, Centroids) else 0
    capacity = -(-max(lengths) // GRAIN) * GRAIN if choices else 0
    last = max(1, choices)
    least = 0 if found.get("known") is True else -1
    return {
        "buckets": Stored((*by_head, capacity), torch.int16, least, last - 1),
        "spans": Stored((*by_head, None, 2), torch.int16, -1, last - 1),
        "known": bool,
        "sorted": [Each([Whole(0, -(-held // block))] * 2) for held in lengths],
    }


def _require_numbers(layer: TurboLayer, held: dict[str, Any], columns: int) -> None:
    """ValueError unless the numbers of a saved compressed layer, each in its range, agree with each other."""
    state, valid, table = RowState(**held["state"]), held["valid"], held["table"].cpu()
    rows = len(state.sealed)
    there = [columns] * rows if valid is None else (columns - valid.shape[1] + valid.sum(1)).tolist()
    kept = [total if layer.window is None else min(total, layer.window - 1) for total in there]
    in_use = torch.arange(table.shape[1]) < torch.tensor(state.sealed)[:, None]
    ends = [[end for blocks in row for end in blocks] for row in held["index"]["sorted"]]
    lengths = state.lengths()
    for agrees, words in (
        (valid is None or valid.shape[1] <= columns, "its padding has more columns than the cache"),
        ([n + gone for n, gone in zip(lengths, state.dropped, strict=True)] == there, "it lacks tokens of the cache"),
        (all(map(operator.ge, lengths, kept)), "it lacks tokens of its window"),
        (torch.equal(table[in_use].unique(), torch.arange(len(held["pages"][0][0]))), "its table leaves out pages"),
        (not table[~in_use].any(), "its table goes on past the end of a row"),
        (
            all(map(_spans_fit, (meta for _, _, meta, _ in held["pages"]))),
            "zeros and spans of its pages end beyond 127",
        ),
        (all(row == sorted(row) for row in ends), "its sorted blocks overlap"),
    ):
        if not agrees:
            raise ValueError(words)


def _spans_fit(meta: torch.Tensor) -> bool:
    """Whether every zero and every zero + span of pages (`PagedHeads.meta`) lies between -127 and 127."""
    zero, span = meta.unflatten(2, (-1, 2)).unbind(3)
    top = zero.short() + span.contiguous().view(torch.uint8).short()
    return not bool((zero < -INT8_MAX).any() | (top > INT8_MAX).any())


def _of_other(layer: Any, held: dict[str, Any], rows: int, columns: int) -> dict[str, Any]:
    """What a saved layer of Transformers' own must be: as a new one, but for what it holds."""
    wanted = {name: _constant(value) for name, value in vars(layer).items() if name != "device"}
    if "dtype" in held:
        wanted["dtype"] = OneOf((torch.dtype, None))
    if isinstance(layer, DynamicLayer):
        keys: Any = held.get("keys")
        like = keys if isinstance(keys, torch.Tensor) else torch.empty(0)
        # a window of 1 keeps all
        count = min(columns, getattr(layer, "sliding_window", 1) - 1 or columns)
        wanted["keys"] = Stored((rows, None, count, None), None, *FINITE)
        wanted["values"] = Stored((rows, *like.shape[1:2], count, None), like.dtype, *FINITE)
        wanted |= {"is_initialized": True} | {name: columns for name in ("cumulative_length",) if name in wanted}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states = {name: held.get(name) for name in FLAGS}
        require(states, dict.fromkeys(FLAGS, dict.fromkeys(layer.conv_states, OneOf((None, torch.Tensor)))), "")
        for name, flag in FLAGS.items():
            each: Any = states[name]
            wanted[flag] = {n: x is not None for n, x in each.items()}
            wanted[name] = {n: x if x is None else Stored((rows, *x.shape[1:]), None, *FINITE) for n, x in each.items()}
        wanted["has_previous_state"] = wanted[FLAGS["conv_states"]]
        if "conv_kernel_size" in wanted:
            sizes = {n: x if x is None else (x.shape or (0,))[-1] for n, x in held["conv_states"].items()}
            wanted["conv_kernel_size"] = sizes
    return wanted


def _constant(value: Any) -> Any:
    """What a new layer has, as it must stay."""
    if isinstance(value, torch.Tensor):
        return Stored(tuple(value.shape), value.dtype, value.item(), value.item())
    return value


def require_alike(held: Sequence[Any]) -> None:
    """ValueError unless the linear layers of a cache hold states of one shape, and any.

    held: of each layer, what `held_by` returned; `require_layer` has found it right.
    """
    for name in FLAGS:
        each = [own[name] for own in held if name in own]
        for n in each[0] if each else ():
            shapes = {torch.Size([]) if states[n] is None else states[n].shape for states in each}
            if len(shapes) > 1:
                raise ValueError(
                    f"{name} {n} of its layers have the shapes {sorted(map(list, shapes))}, and should have one"
                )


def hold(layer: Any, held: dict[str, Any], device: torch.device) -> None:
    """Give a new layer what `held_by` returned of another one, which `require_layer` has found right."""
    if not isinstance(layer, TurboLayer):
        vars(layer).update(held, device=device)
        return
    opened, state = held["open"], RowState(**held["state"])
    sizes = ((*x.shape[:2], 0, x.shape[n]) for x, n in zip(opened, (3, 2), strict=False))
    layer.lazy_initialization(*(torch.empty(size, dtype=held["dtype"], device=device) for size in sizes))
    pages = tuple(
        PagedHeads(widths_of(width)[0], *own) for (width, _), own in zip(layer.pool.groups, held["pages"], strict=True)
    )
    layer.state, layer.valid_prefix = state, held["valid"]
    layer.buffer.k, layer.buffer.v, layer.buffer.k_scale, layer.buffer.v_scale = opened
    layer.pool.hold(pages, held["table"].cpu(), state.sealed)
    layer.bucket_index.hold(held["index"])
    layer.index_keys = None if held["index_keys"] is None else IndexKeys(held["index_keys"])
