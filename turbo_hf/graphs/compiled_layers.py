"""Decode steps whose layers are compiled by inductor, each as one graph, and captured like any other step.

Layers that differ in their weights alone share their code, which is compiled once, in seconds. Between layers a step is
the model's own. Attention is an opaque operator (`step_operator`). A layer is compiled without graph breaks or not at
all: a model for which that fails runs uncompiled, and `Handle.report` says why.
"""

import copy
import functools
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from turbo_hf.attention.sparse_step import Source
from turbo_hf.attention.step_operator import IN_LAYER, StepView, attending
from turbo_hf.attention.turbo_attention import HANDED_ON, compressed
from turbo_hf.cache.rows import NewQKV
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import Unsupported, shortened, warn
from turbo_hf.models.versions import CACHE
from turbo_hf.patches.layers import attention_layers

BACKEND = "inductor"

OPTIONS: dict[str, Any] = {
    # the runner captures the step itself: caches move between captures, which torch's own graphs would not notice
    "triton.cudagraphs": False,
    # kept on disk, in TORCHINDUCTOR_CACHE_DIR
    "fx_graph_cache": True,
    # round where the model rounds, so that tokens differ at near ties alone
    "emulate_precision_casts": True,
}
"""Options of inductor for these layers alone."""

# products with one row as fused reductions, tiles tuned
TUNED = {**OPTIONS, "coordinate_descent_tuning": True}

VIEW = StepView()


class Region(NamedTuple):
    """A layer that is compiled. number: its own. path: the names that lead from it to its attention module."""

    number: int
    layer: Any
    path: list[str]
    attention: Any


def regions_of(model: Any) -> list[Region]:
    """The layers of a model, each with its attention.

    Raises:
        Unsupported: one cannot be compiled by itself.
    """
    names, found = {module: name for name, module in model.named_modules()}, []
    for at in attention_layers(model):
        path = names[at.module].split(".")
        ends = [place for place, name in enumerate(path, 1) if name.isdigit()]
        if not ends:
            raise Unsupported(f"the module of layer {at.index} is not in a list of layers")
        layer = model.get_submodule(".".join(path[: ends[-1]]))
        found.append(Region(at.index, layer, path[ends[-1] :], at.module))
    if len({region.layer for region in found}) < len(found):
        raise Unsupported("one of its layers has several attention modules")
    return found


def _twin(module: Any, path: list[str], config: Any) -> Any:
    """A layer as it is traced: the same weights, modules and settings, but for its attention, which has this config and
    no hooks."""
    twin = object.__new__(type(module))
    # what hooks and names are kept in begins so
    hooks = {name: type(kept)() for name, kept in vars(module).items() if name.startswith("_forward_")}
    twin.__dict__ = {**vars(module), **hooks}
    if path:
        twin.__dict__["_modules"] = {**module._modules, path[0]: _twin(module._modules[path[0]], path[1:], config)}
    else:
        twin.__dict__["config"] = config
    return twin


def _forward(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return layer.forward(*args, **kwargs)


def _call(thread: int, function: Any, twin: Any, attend: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of a layer's `forward`: its compiled code, in the thread whose step it is."""
    if threading.get_ident() != thread:
        return type(layer).forward(layer, *args, **kwargs)
    given = {name: VIEW if isinstance(x, TurboCache) else x for name, x in kwargs.items() if name not in HANDED_ON}
    with attending(functools.partial(attend, kwargs.get("position_embeddings"))):
        return function(twin, [VIEW if isinstance(x, TurboCache) else x for x in args], given)


def _nothing(region: Region, rotary: Any, query: torch.Tensor, *args: Any) -> torch.Tensor:
    """As `_attend`, for a first run that only compiles."""
    return torch.zeros_like(query)


def _attend(cache: TurboCache, region: Region, rotary: Any, *qkv_and_scoring: Any) -> torch.Tensor:
    """Attention of a layer, for `calling`."""
    *qkv, scoring = qkv_and_scoring
    layer: Any = cache.layers[region.number]
    return compressed(cache, layer, Source(region.attention, rotary), NewQKV(*qkv), None, scoring)


class CompiledLayers:
    """The layers of one patched model, compiled for decode steps. Threads share them.

    Args:
        asked: `TurboConfig.compile`, True or "tuned".

    Attributes:
        reason: why they are not compiled; None: no reason is known.
        seconds: how long compilation, or loading, has taken so far.
    """

    def __init__(self, asked: Any = True) -> None:
        self.asked = asked
        self.reason: str | None = None
        self.seconds = 0.0
        self._lock = threading.RLock()
        self._refused = False
        self._functions: dict[Any, tuple[Any, types.CodeType]] = {}
        self._forget()

    def _forget(self) -> None:
        for _, code in self._functions.values():
            # torch frees what it has compiled for a code together with it, and holds on to the code
            with suppress(AttributeError):
                dynamo: Any = torch._dynamo
                dynamo.reset_code(code)
        self._functions = {}
        self._regions: list[Region] = []
        self._known: set[Any] = set()
        self._place: Any = None

    def __reduce__(self) -> Any:
        # a copy of the model compiles its own
        return CompiledLayers, (self.asked,)

    def words(self) -> str:
        """How layers are compiled, for reports."""
        if self.reason is not None:
            return f"layers not compiled ({self.reason})"
        if self._known:
            return f"layers compiled ({self.seconds:.1f} s)"
        return "layers compiled at the first one"

    def refuse(self, reason: str, lasting: bool = True) -> None:
        """Layers are not compiled: warn once for each reason. lasting: nor will they be."""
        if reason != self.reason:
            warn(
                f"turbo_hf: compile={self.asked!r}: layers are not compiled: {reason}. TurboConfig(compile=False) is "
                "silent."
            )
        self.reason = reason
        if lasting:
            self.remove()

    def remove(self) -> None:
        """Forget all compiled code, and compile no more."""
        self._refused = True
        self._forget()

    def ready(self, model: Any, inputs: dict[str, Any], dry: Callable[[], Any]) -> bool:
        """Whether the layers of a step over such inputs are compiled; if they were not yet, they are compiled here.

        inputs: keywords of the model, with a TurboCache and without a mask. dry: runs the step, within `calling`.
        """
        cache: TurboCache = inputs[CACHE]
        if self._refused or cache.decompressed:
            return False
        place, rows = (model.device, model.dtype), len(inputs["input_ids"])
        key = (torch.is_inference_mode_enabled(), *((name, _kind(value)) for name, value in inputs.items()))
        with self._lock:
            if place != self._place:
                # the model has been moved
                self._forget()
                self._place = place
            self.reason = None
            try:
                self._regions = self._regions or regions_of(model)
                # also since it has been compiled
                if any("forward" in vars(x) for at in self._regions for x in (at.layer, at.attention)):
                    raise Unsupported("the forward method of a layer has been replaced")
                if key not in self._known:
                    self._compile(rows, dry)
                    self._known.add(key)
            except Exception as error:
                self.refuse(str(error) if isinstance(error, Unsupported) else shortened(error))
            return key in self._known

    def _compile(self, rows: int, dry: Callable[[], Any]) -> None:
        start = time.perf_counter()
        # in all layers, before the first one stores anything
        with self.calling(rows, _nothing):
            dry()
        self.seconds += time.perf_counter() - start

    def _function(self, rows: int) -> Any:
        """What is compiled at this batch size, for each kind of layers that it is called with."""
        key = (rows, torch.is_inference_mode_enabled())
        if key not in self._functions:
            # a code object of its own, so that its recompilations are counted apart, and it can be reset
            code = _forward.__code__.replace()
            options = (TUNED if self.asked == "tuned" else OPTIONS) if BACKEND == "inductor" else None
            given: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": BACKEND, "options": options}
            self._functions[key] = torch.compile(types.FunctionType(code, globals()), **given), code
        return self._functions[key][0]

    def steps(self, inputs: dict[str, Any]) -> Any:
        """As `calling`, over the cache of a step. After `ready` returned True."""
        return self.calling(len(inputs["input_ids"]), functools.partial(_attend, inputs[CACHE]))

    @contextmanager
    def calling(self, rows: int, attend: Any) -> Iterator[None]:
        """Inside, the model's layers run compiled in this thread; other threads wait for their own.

        attend: (layer, its rotary (cos, sin), *arguments of an `Attend`), and returns as that.
        """
        with self._lock:
            function = self._function(rows)
            config = copy.copy(self._regions[0].attention.config)
            config._attn_implementation = IN_LAYER
            try:
                for region in self._regions:
                    twin = _twin(region.layer, region.path, config)
                    own = threading.get_ident(), function, twin, functools.partial(attend, region), region.layer
                    region.layer.__dict__["forward"] = functools.partial(_call, *own)
                yield
            finally:
                for region in self._regions:
                    region.layer.__dict__.pop("forward", None)


def _kind(value: Any) -> Any:
    """The properties of an input that compiled code depends on."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, int) else type(value)
