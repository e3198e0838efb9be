"""Captured steps that outlive their `generate` call: the next one's cache moves into the memory that they read.

A capture holds addresses. It serves another cache of the same kind once that cache's tokens lie at them: a copy takes
milliseconds, a capture a tenth of a second. It also holds what the model was: one that has changed is captured anew.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.page_pool import PageTable
from turbo_hf.ops import gpu

MOST_BYTES = 256 << 20
"""Pages and open tokens of all layers that are kept between calls."""

_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
"""Attributes of every module that no pass reads, or whose hooks the runner looks for (`Runner.look_for_hooks`)."""

_PLAIN = frozenset({type(None), bool, int, float, str})

_DEPTH, _LONGEST = 4, 1000
"""How deep attributes are looked into, and into how many items of one."""


class _Same:
    """Compared by identity."""

    __slots__ = ("held",)

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    __hash__ = object.__hash__


class _Notes:
    """What a capture may hold of a model, in one list, compared by ==. Modules and weights are not kept alive.

    A flat list: thousands of small objects would have Python collect garbage at each call.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []
        # objects whose attributes have been noted
        self._seen: set[int] = set()

    def note(self, value: Any, depth: int = 0) -> None:
        """Add a value, and what it holds."""
        kind, found = type(value), self.found
        # tensors last: asking whether something is one takes torch microseconds
        if kind in _PLAIN:
            found += (kind, value)
        elif kind in (dict, list, tuple, set) and depth < _DEPTH and len(value) <= _LONGEST:
            found += (kind, len(value))
            if kind is dict:
                found += map(str, value)
            for x in value.values() if kind is dict else value:
                self.note(x, depth + 1)
        elif isinstance(value, torch.nn.Module):
            found += (kind, id(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        else:
            found.append(_Same(value))
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict) and not callable(value) and id(value) not in self._seen:
                self._seen.add(id(value))
                self.note(held, depth + 1)

    def _tensor(self, x: torch.Tensor) -> None:
        """A tensor: where it lies, not its numbers, which a replay reads."""
        plain = x.layout == torch.strided and type(x.data) is torch.Tensor
        # the memory of a subclass, as torchao's, is not known: such a model is captured in each call
        place = (x.data_ptr(), x.stride()) if plain else (_Same(object()),)
        self.found += (id(x), *place, x.dtype, x.shape)

    def kinds(self, kinds: Iterable[type]) -> None:
        """What classes hold, up to torch's own."""
        bases = {
            base for kind in kinds for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins"))
        }
        for base in sorted(bases, key=lambda x: (x.__module__, x.__qualname__)):
            for name, value in vars(base).items():
                self.found += (name, _Same(value)) if type(value) not in _PLAIN else (name, value)


def _switches() -> list[Any]:
    """Torch's switches that change what is computed. One that cannot be read now has its error in its place."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    names = (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    asked: list[Callable[[], Any]] = [
        torch.is_inference_mode_enabled,
        torch.get_default_dtype,
        # raises where the newer `fp32_precision` has been set
        torch.get_float32_matmul_precision,
        torch.are_deterministic_algorithms_enabled,
        torch.backends.cuda.preferred_blas_library,
        *(functools.partial(getattr, matmul, name, None) for name in (*names, "fp32_precision")),
        *(functools.partial(getattr, cudnn, name, None) for name in ("enabled", "deterministic", "benchmark")),
        functools.partial(getattr, getattr(cudnn, "conv", None), "fp32_precision", None),
    ]
    found: list[Any] = []
    for ask in asked:
        try:
            found.append(ask())
        except RuntimeError as error:
            found.append(str(error))
    return found


def model_now(model: Any) -> list[Any]:
    """All that steps of a model depend on besides their inputs and the numbers of weights, as far as its modules, their
    classes, and torch's switches tell."""
    notes, modules = _Notes(), list(model.modules())
    notes.found += (gpu.stream(model.device), *_switches())
    for config in (model.config, model.config.get_text_config(decoder=True)):
        notes.note(config)
    for module in modules:
        notes.found.append(type(module))
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                notes.found.append(name)
                notes.note(value)
    notes.kinds({type(module) for module in modules})
    return notes.found


class _KeptLayer(NamedTuple):
    """What captured launches of a layer have the addresses of, and the layer."""

    of: "weakref.ref[TurboLayer]"
    kind: Any
    paged: Any
    table: torch.Tensor
    buffer: tuple[torch.Tensor, ...]
    nonfinite: torch.Tensor
    order: torch.Tensor
    sealed: torch.Tensor
    open: torch.Tensor


def _states(layer: Any) -> list[tuple[dict[int, Any], int, torch.Tensor]]:
    """Where a layer of linear attention holds each of its states, and that."""
    kinds = layer.conv_states, layer.recurrent_states
    return [(held, at, state) for held in kinds for at, state in held.items() if state is not None]


def _like(x: torch.Tensor) -> Any:
    return x.shape, x.dtype, x.device, x.stride()


def _kind(layer: TurboLayer) -> Any:
    """What must be equal, for launches over one layer to serve another."""
    state = layer.state
    shape = layer.rows, layer.heads, layer.dim, layer.dtype, layer.device
    order = None if layer.head_order is None else tuple(layer.head_order)
    return layer.config, layer.window, layer.index, order, _Same(layer.balance), shape, state.block, state.staying


def _is_apart(layer: TurboLayer) -> bool:
    """Whether captures over a layer serve one call alone: buckets and what waits for a `crop` lie elsewhere, too, and
    latents have not been tried on a GPU."""
    return layer.selector is not None or layer.latent or layer.state.recording


def _memory(layer: TurboLayer) -> _KeptLayer:
    pool, counts, state = layer.pool, layer.device_counts, layer.state
    places = pool.paged, pool.table.on(layer.device), layer.buffer.tensors(), layer.nonfinite, layer.order
    return _KeptLayer(weakref.ref(layer), _kind(layer), *places, counts.sealed(state), counts.open(state))


class KeptSteps:
    """The memory of captured steps, once their `generate` has ended.

    Args:
        steps: the `ReplayableSteps` that were captured; they have not been closed yet.
        model: `model_now` at the capture.
    """

    def __init__(self, steps: Any, model: list[Any]):
        self._cache, self._model, self.used = weakref.ref(steps.cache), model, steps.used
        self._nonfinite = steps.nonfinite
        self._groups = [
            (group.arrived, group.plans, group.sealed, group.open, [_memory(layer) for layer in group.layers])
            for group in steps.groups
        ]
        self._linear = [(weakref.ref(layer), [state for *_, state in _states(layer)]) for layer in steps.linear]

    @staticmethod
    def of(steps: Any, model: list[Any]) -> "KeptSteps | None":
        """None: not of sparse layers, latents, blocks that wait for a `crop`, ranks that must agree, much memory."""
        cache, size = steps.cache, 0
        for layer in steps.layers:
            if _is_apart(layer):
                return None
            size += sum(layer.pool.nbytes()) + layer.buffer.nbytes()
        size += sum(state.nbytes for layer in steps.linear for *_, state in _states(layer))
        alone = cache.mark.ranks.count == 1
        return KeptSteps(steps, model) if alone and steps.used and size <= MOST_BYTES else None

    def _pairs(self, steps: Any) -> Iterator[tuple[TurboLayer, _KeptLayer]]:
        for group, kept in zip(steps.groups, self._groups, strict=True):
            yield from zip(group.layers, kept[-1], strict=True)

    def _tables(self, steps: Any) -> dict[tuple[PageTable, int], PageTable] | None:
        """The table of each layer within this memory, by its present one and the memory for it, which layers may share.

        None: some layer does not fit, or somebody still uses its memory.
        """
        tables: dict[tuple[PageTable, int], PageTable] = {}
        for layer, kept in self._pairs(steps):
            free = kept.of() in (None, layer) and not _is_apart(layer)
            if not free or _kind(layer) != kept.kind or max(layer.state.open) > kept.buffer[0].shape[2]:
                return None
            state, key, blocks = layer.state, (layer.pool.table, id(kept.table)), kept.table.shape[1]
            if key not in tables:
                table = key[0].within(state.sealed, state.whole(), len(kept.paged[0].k), blocks)
                if table is None:
                    return None
                tables[key] = table
        return tables

    def _linear_moves(self, steps: Any) -> list[Any] | None:
        """(where a state is held, that state), memory for it, of each layer of linear attention; None: as `_tables`."""
        moves: list[Any] = []
        for layer, (of, states) in zip(steps.linear, self._linear, strict=True):
            present = _states(layer)
            if of() not in (None, layer) or [_like(x) for *_, x in present] != list(map(_like, states)):
                return None
            moves += zip(present, states, strict=True)
        return moves

    def serve(self, steps: Any, model: list[Any]) -> bool:
        """Move the cache of `steps`, which have reserved nothing yet, into this memory.

        False: it does not fit, somebody still uses the memory, or the model has changed. Nothing has been done.

        model: `model_now`.
        """
        other = self._cache()
        if other not in (None, steps.cache) or model != self._model:
            return False
        counts = [[len(group.layers) for group in steps.groups], [len(kept[-1]) for kept in self._groups]]
        counts[0] += [len(steps.nonfinite), len(steps.linear)]
        counts[1] += [len(self._nonfinite), len(self._linear)]
        if counts[0] != counts[1]:
            return False
        tables, moves = self._tables(steps), self._linear_moves(steps)
        if tables is None or moves is None:
            return False
        for (held, at, present), memory in moves:
            held[at] = memory if memory is present else memory.copy_(present)
        for new, memory in zip(steps.nonfinite, self._nonfinite, strict=True):
            memory.copy_(new)
        steps.nonfinite, steps.used = self._nonfinite, self.used
        for group, (arrived, plans, sealed, opened, layers) in zip(steps.groups, self._groups, strict=True):
            sealed.copy_(group.sealed)
            opened.copy_(group.open)
            group.arrived, group.plans, group.sealed, group.open = arrived, plans, sealed, opened
            for layer, kept in zip(group.layers, layers, strict=True):
                table = tables[layer.pool.table, id(kept.table)]
                layer.pool.move(kept.paged, table, kept.table)
                layer.buffer.move(kept.buffer, max(layer.state.open))
                layer.nonfinite, layer.order = kept.nonfinite, kept.order
                layer.device_counts.keep(layer.state, kept.sealed, kept.open)
            group.reserved = list(group.layers[0].pool.table.reserved)
            group.plan(group.state.sealed)
        return True
