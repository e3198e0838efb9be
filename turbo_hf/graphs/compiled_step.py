"""Decode steps compiled by inductor as one graph, in which all but attention is fused; captured like any other step.

Attention is an opaque operator (`step_operator`). The step is compiled without graph breaks or not at all: a model for
which that fails runs uncompiled, and `Handle.report` says why.
"""

import functools
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from turbo_hf.attention.sparse_step import Source
from turbo_hf.attention.step_operator import Kind, StepView, attending, nothing
from turbo_hf.attention.turbo_attention import HANDED_ON, compressed
from turbo_hf.cache.new_columns import NewQKV
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import shortened, warn
from turbo_hf.layout import Scoring
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
"""Options of inductor for this step alone."""

# products with one row as fused reductions, tiles tuned: 8 % of a step of 8B, for half a minute of compilation
TUNED = {**OPTIONS, "coordinate_descent_tuning": True}


def _forward(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


class CompiledStep:
    """The decode step of one patched model, compiled when it is first asked for. Threads share it.

    Attributes:
        tuned: whether inductor tunes its tiles.
        reason: why steps are not compiled; None: no reason is known.
        seconds: how long compilation has taken so far.
    """

    def __init__(self, tuned: bool = False) -> None:
        self.tuned = tuned
        self.reason: str | None = None
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._refused = False
        self._code: types.CodeType | None = None
        self._forget()

    def _forget(self) -> None:
        if self._code is not None:
            # torch frees what it has compiled for a code together with it, and holds on to the code
            with suppress(AttributeError):
                dynamo: Any = torch._dynamo
                dynamo.reset_code(self._code)
        self._function: Any = None
        self._code = None
        self._view: StepView | None = None
        self._kinds: list[Kind] = []
        self._modules: dict[int, Any] = {}
        self._known: set[Any] = set()
        self._place: Any = None

    def __reduce__(self) -> Any:
        # a copy of the model compiles its own
        return CompiledStep, (self.tuned,)

    def words(self) -> str:
        """How decode steps are compiled, for reports."""
        if self.reason is not None:
            return f"not compiled ({self.reason})"
        if self._known:
            return f"compiled as one graph ({self.seconds:.0f} s)"
        return "compiled as one graph, at the first one"

    def refuse(self, reason: str, lasting: bool = True) -> None:
        """Warn, once for each reason, that steps are not compiled. lasting: nor will they be."""
        if reason != self.reason:
            asked = 'compile="tuned"' if self.tuned else "compile=True"
            warn(f"turbo_hf: {asked}: steps are not compiled: {reason}. TurboConfig(compile=False) is silent.")
        self.reason = reason
        if lasting:
            self.remove()

    def remove(self) -> None:
        """Forget all compiled code, and compile no more."""
        self._refused = True
        self._forget()

    def ready(self, model: Any, inputs: dict[str, Any], warm: Callable[[Callable[[], Any]], Any]) -> bool:
        """Whether a step over such inputs is compiled; the first time it is compiled here, without touching a cache.

        inputs: keywords of the model, with a TurboCache and without a mask. warm: as in `CudaDevice`.
        """
        cache = inputs[CACHE]
        if self._refused or cache.decompressed:
            return False
        place = (model.device, model.dtype)
        key = (torch.is_inference_mode_enabled(), *((name, _kind(value)) for name, value in inputs.items()))
        with self._lock:
            kinds = [(layer.window, layer.selector is not None) for layer in cache.turbo_layers()]
            if len(kinds) < len(cache.layers) or (self._kinds and kinds != self._kinds):
                return False
            if place != self._place:
                # the model has been moved
                self._forget()
                self._place = place
            if key not in self._known:
                self._compile(model, inputs, kinds, key, warm)
            elif not self._refused:
                self.reason = None
            return key in self._known

    def _compile(self, model: Any, inputs: dict[str, Any], kinds: list[Kind], key: Any, warm: Any) -> None:
        rows, start = len(inputs["input_ids"]), time.perf_counter()
        # a minute of compilation shall not look like a hang
        sys.stderr.write(
            f"turbo_hf: compiling the decode step for batch size {rows} (up to a minute; less once it is on disk) ...\n"
        )
        try:
            if self._function is None:
                self._prepare(model, kinds)
            with attending(nothing):
                warm(functools.partial(self._run, model, inputs))
        except Exception as error:
            self.refuse(shortened(error))
            return
        seconds = time.perf_counter() - start
        sys.stderr.write(f"turbo_hf: compiled in {seconds:.0f} s\n")
        self.seconds += seconds
        self.reason = None
        self._known.add(key)

    def _prepare(self, model: Any, kinds: list[Kind]) -> None:
        # a code object of its own, so that its recompilations are counted apart, and it can be reset
        self._code = _forward.__code__.replace()
        own = types.FunctionType(self._code, globals())
        options = (TUNED if self.tuned else OPTIONS) if BACKEND == "inductor" else None
        self._function = torch.compile(own, fullgraph=True, backend=BACKEND, options=options)
        self._view, self._kinds = StepView(kinds, model.device), kinds
        self._modules = {at.index: at.module for at in attention_layers(model)}

    def _run(self, model: Any, inputs: dict[str, Any]) -> Any:
        given = {name: value for name, value in inputs.items() if name not in HANDED_ON}
        out = self._function(model, {**given, CACHE: self._view})
        out[CACHE] = inputs[CACHE]
        return out

    def __call__(self, model: Any, inputs: dict[str, Any]) -> Any:
        """`model(**inputs)`, after `ready` returned True."""
        cache: TurboCache = inputs[CACHE]

        def attend(index: int, query: Any, key: Any, value: Any, rotary: Any, scoring: Scoring) -> torch.Tensor:
            layer: Any = cache.layers[index]
            source = Source(self._modules[index], rotary)
            return compressed(cache, layer, source, NewQKV(query, key, value), None, scoring)

        with attending(attend):
            return self._run(model, inputs)


def _kind(value: Any) -> Any:
    """The properties of an input that compiled code depends on."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, int) else type(value)
