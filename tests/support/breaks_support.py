"""What breaks off a pass or call at a chosen place, and an oracle for the cache that it leaves."""

import copy
import functools
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from choices import flat_config
from models import SHAPE, prompts, tiny_llama, tiny_mistral
from torch import Tensor

import turbo_hf
from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.models.versions import CACHE
from turbo_hf.sparse.selectors import Centroids

ROWS, BLOCK = 2, 32
HELD = 2 * BLOCK - 1
"""Tokens of a prompt in every prepared cache: the next one seals a block."""

SOURCES = (
    str(Path(turbo_hf.__file__).parent),
    *(
        str(Path(transformers.__file__).parent / name)
        for name in ("cache_utils.py", "models/llama/modeling_llama.py", "models/mistral/modeling_mistral.py")
    ),
)
"""Files whose lines may break off."""


LAYERS = ["linear_attention", "linear_attention", "full_attention"]
"""Of a hybrid model whose passes have an end that a cache sees."""


class Broken(BaseException):
    """As KeyboardInterrupt: no handler of errors catches it."""


class BrokenError(RuntimeError):
    """As running out of memory."""


class Lines:
    """Counts the lines that run within the given files, and raises at the n-th; 0: at none."""

    def __init__(self, at: int = 0, error: type[BaseException] = Broken, files: tuple[str, ...] = SOURCES):
        self.count, self._at, self._error, self._files = 0, at, error, files
        self._mine: dict[str, bool] = {}
        self.place = ""

    def __enter__(self) -> "Lines":
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._mine:
            self._mine[name] = name.startswith(self._files)
        return self._line if self._mine[name] else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise self._error("injected")
        return self._line


class Calls:
    """Counts the calls of functions, which it replaces where they are found by name, and raises in the n-th."""

    def __init__(self, places: list[tuple[Any, str]], at: int = 0):
        self.count, self._places, self._at = 0, places, at
        self._kept: list[Any] = []
        self.place = ""

    def __enter__(self) -> "Calls":
        self._kept = [getattr(owner, name) for owner, name in self._places]
        for (owner, name), real in zip(self._places, self._kept, strict=True):
            setattr(owner, name, self._counted(name, real))
        return self

    def __exit__(self, *exc: object) -> None:
        for (owner, name), real in zip(self._places, self._kept, strict=True):
            setattr(owner, name, real)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._at:
                self.place = name
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return real(*args, **kwargs)

        return call


ALLOCATIONS: list[tuple[Any, str]] = [
    *(
        (torch, name)
        for name in ("empty", "zeros", "ones", "full", "cat", "stack", "arange", "where", "take_along_dim")
    ),
    *((torch, name) for name in ("empty_like", "zeros_like", "searchsorted", "index_select", "frombuffer", "tensor")),
    *((torch.nn.functional, name) for name in ("pad", "linear", "scaled_dot_product_attention")),
    *((Tensor, name) for name in ("new_empty", "new_full", "clone", "contiguous", "to", "float", "copy_", "argsort")),
    *((Tensor, name) for name in ("index_select", "index_copy", "repeat_interleave", "masked_fill", "unique", "sort")),
]
"""What takes memory, and may find none."""


def launches() -> list[tuple[Any, str]]:
    """The entry points of our kernels, and of what stands in for them, wherever they have been imported."""
    found = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("turbo_hf.") or file_of(name).startswith("reference") or hasattr(module, "__path__"):
            continue
        for attribute, value in vars(module).items():
            of = getattr(value, "__module__", None) or ""
            ours = of.startswith("turbo_hf.ops.") and not file_of(of).startswith(("kernel", "host_device"))
            if callable(value) and ours and of != name:
                found.append((module, attribute))
    return found


def file_of(module: str) -> str:
    """A module's name without its folders."""
    return module.rpartition(".")[2]


# --- routes ---------------------------------------------------------------------------------------------------------


@dataclass
class Route:
    """A model, and how it comes to a cache.

    near: by what logits may differ.
    """

    name: str
    model: Any
    new_cache: Callable[[], TurboCache]
    near: float = 1e-4
    handle: Any = None
    ids: Tensor = field(default_factory=lambda: prompts(ROWS, HELD + 40))

    @torch.no_grad()
    def run(self, cache: TurboCache, first: int, tokens: int) -> Tensor:
        """Logits of the last token of a pass over tokens `first` to `first + tokens`."""
        out: Tensor = self.model(self.ids[:, first : first + tokens], **{CACHE: cache}).logits[:, -1]
        return out

    def prepared(self) -> TurboCache:
        """A cache of `HELD` tokens."""
        cache = self.new_cache()
        self.run(cache, 0, HELD)
        return cache


def _selectors(layers: int) -> tuple[SparseConfig, dict[int, Centroids]]:
    config = SparseConfig(selector="kmeans-rotated", probes=2, sink_tokens=4, window_tokens=8)
    generator = torch.Generator().manual_seed(3)
    centroids = torch.randn(SHAPE["num_key_value_heads"], 8, SHAPE["head_dim"], generator=generator)
    return config, {n: Centroids(config, n, centroids, pre_rotary=False) for n in range(layers)}


def hybrid_model(**options: Any) -> Any:
    """Linear attention before and after full attention, unless options say otherwise."""
    from families_support import FAMILY_CASES, build  # noqa: PLC0415  it builds many configs

    case = next(case for case in FAMILY_CASES if case.model_type == "qwen3_next")
    return build(case.model_type, **{**case.options, **options})


SMALL = flat_config(block_size=BLOCK)
MIXED = flat_config(block_size=BLOCK, low_bits=2, low_heads=0.5)


def unpatched(name: str, model: Any = None, dense: tuple[int, ...] = ()) -> Route:
    model = tiny_llama() if model is None else model
    return Route(name, model, functools.partial(TurboCache, model.config, SMALL, uncompressed_layers=dense))


def patched(name: str, config: TurboConfig = SMALL, model: Any = None, dense: tuple[int, ...] = ()) -> Route:
    """The patch stays on."""
    route = unpatched(name, model, dense)
    handle = turbo_hf.patch(route.model, config)
    return replace(route, handle=handle, new_cache=route.new_cache if dense else handle.new_cache)


def sparse() -> Route:
    route = patched("sparse")
    config, selectors = _selectors(2)
    chosen = replace(SMALL, sparse=config)
    return replace(route, new_cache=lambda: TurboCache(route.model.config, chosen, selectors=selectors))


def deferring() -> Route:
    route = patched("deferring")

    def new_cache() -> TurboCache:
        cache = route.new_cache()
        cache.deferred.wanted = True
        return cache

    return replace(route, new_cache=new_cache)


ROUTES: dict[str, Callable[[], Route]] = {
    "compressed": lambda: patched("compressed"),
    "deferring": deferring,
    "mixed": lambda: patched("mixed", MIXED),
    "dense-first": lambda: patched("dense-first", dense=(0,)),
    "dense-last": lambda: patched("dense-last", dense=(1,)),
    "window": lambda: patched("window", model=tiny_mistral(40)),
    "dense-window": lambda: patched("dense-window", model=tiny_mistral(40), dense=(1,)),
    "sparse": sparse,
    "hybrid": lambda: patched("hybrid", model=hybrid_model()),
    "unpatched": lambda: unpatched("unpatched"),
    "unpatched-dense": lambda: unpatched("unpatched-dense", dense=(1,)),
    "unpatched-hybrid": lambda: unpatched("unpatched-hybrid", hybrid_model(layer_types=LAYERS)),
    "unpatched-window": lambda: unpatched("unpatched-window", tiny_mistral(40)),
}
"""What makes each."""


# --- operations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """What is done to a cache of `held` tokens, and the columns that it adds; one by one: each column is a pass."""

    name: str
    held: int
    adds: int
    do: Callable[[Route, TurboCache], Any]
    one_by_one: bool = False


def _order(_: Route, cache: TurboCache) -> None:
    cache.reorder_cache(torch.tensor([1, 1]))


OPERATIONS = [
    Operation("prompt", 0, HELD, lambda route, cache: route.run(cache, 0, HELD)),
    Operation("step", HELD - 7, 1, lambda route, cache: route.run(cache, HELD - 7, 1)),
    Operation("seal", HELD, 1, lambda route, cache: route.run(cache, HELD, 1)),
    Operation("chunk", HELD, 20, lambda route, cache: route.run(cache, HELD, 20)),
    Operation("crop", HELD, -5, lambda route, cache: cache.crop(-5)),
    Operation("crop-sealed", HELD, -40, lambda route, cache: cache.crop(-40)),
    Operation("reorder", HELD, 0, _order),
    Operation("select", HELD, 0, lambda route, cache: cache.batch_select_indices(torch.tensor([1, 0]))),
    Operation("repeat", HELD, 0, lambda route, cache: cache.batch_repeat_interleave(1)),
    Operation("record", HELD, 0, lambda route, cache: cache.activate_past_recording()),
    Operation("stop", HELD, 0, lambda route, cache: cache.stop_recording()),
    Operation("reset", HELD, -HELD, lambda route, cache: cache.reset()),
    Operation("copy", HELD, 0, lambda route, cache: copy.deepcopy(cache)),
]


TOLERATED = suppress(Broken, BrokenError, torch.OutOfMemoryError)
"""Injected errors end here."""


class Judge:
    """Says what an operation that broke off has left of a cache.

    "before", "after": it answers as a cache without it, or with all of it. "refused": the next pass raises, with what
    to do, and so does that of a copy. Everything else is "WRONG".
    """

    def __init__(self, route: Route, operation: Operation):
        self.route, self.operation = route, operation
        self.base = route.new_cache()
        if operation.name == "stop":
            # what waits for a crop is sealed by it
            self.base.activate_past_recording()
        if operation.held:
            route.run(self.base, 0, operation.held)
        done = copy.deepcopy(self.base)
        # what a whole cache answers, by its columns, before and after the operation
        self.wanted = [(done.get_seq_length(), self._next(copy.deepcopy(done)), "before")]
        for at in range(operation.adds if operation.one_by_one else 1):
            if operation.one_by_one:
                route.run(done, operation.held + at, 1)
            else:
                operation.do(route, done)
            self.wanted.append((done.get_seq_length(), self._next(copy.deepcopy(done)), "after"))
        self.prompt = route.run(route.new_cache(), 0, 9)

    def _next(self, cache: TurboCache) -> Tensor:
        """Logits of one more token, the same one wherever it comes."""
        held = cache.get_seq_length()
        # position and number of rows follow from the cache
        with torch.no_grad():
            out: Tensor = self.route.model(self.route.ids[:, -1:], **{CACHE: cache}).logits[:, -1]
        assert cache.get_seq_length() == held + 1
        return out

    def of(self, cache: TurboCache) -> str:
        """The verdict on a cache, which is used up."""
        twin, claimed = copy.deepcopy(cache), cache.get_seq_length()
        try:
            got = self._next(cache)
        except ValueError as error:
            return self._refused(cache, twin, str(error))
        for columns, want, name in self.wanted:
            if claimed == columns and got.shape == want.shape and bool((got - want).abs().max() < self.route.near):
                return name
        return "WRONG: accepted"

    def _refused(self, cache: TurboCache, twin: TurboCache, message: str) -> str:
        if "reset() it" not in message:
            return f"WRONG: {message}"
        with suppress(ValueError):
            self._next(twin)
            return "WRONG: a copy is accepted"
        cache.reset()
        return "refused" if torch.equal(self.route.run(cache, 0, 9), self.prompt) else "WRONG: reset"


def every_line(
    route: Route, operation: Operation, error: type[BaseException] = Broken, step: int = 1,
    files: tuple[str, ...] = SOURCES,
) -> Counter[str]:  # fmt: skip
    """Verdicts over an exception at each `step`-th line of an operation."""
    return _every(route, operation, lambda at: Lines(at, error, files), step)


def every_call(route: Route, operation: Operation, places: list[tuple[Any, str]], step: int = 1) -> Counter[str]:
    """Verdicts over an error in each `step`-th call of some functions."""
    return _every(route, operation, lambda at: Calls(places, at), step)


def _every(route: Route, operation: Operation, breaking: Callable[[int], Any], step: int) -> Counter[str]:
    judge, found = Judge(route, operation), Counter[str]()
    whole = copy.deepcopy(judge.base)
    with breaking(0) as counted:
        operation.do(route, whole)
    for at in range(1, counted.count + 1, step):
        cache = copy.deepcopy(judge.base)
        with TOLERATED, breaking(at) as broken:
            operation.do(route, cache)
        if not broken.place:
            # a first run has filled caches of Python's own
            break
        verdict = judge.of(cache)
        found[f"{verdict} ({broken.place})" if verdict.startswith("WRONG") else verdict] += 1
    return found
