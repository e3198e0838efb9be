"""The mark of a cache: a pass or an operation over it has begun, and has not ended. Decorators for methods of a cache.

The mark is set before anything changes and cleared at the end, not in an exception handler, which Ctrl-C or a second
error would cut short. A mark that still stands refuses the next pass or operation.
"""

import copy
import functools
from collections.abc import Callable, Hashable
from threading import get_ident
from typing import Any, ParamSpec, TypeVar, cast

import torch

from turbo_hf.ranks import ALONE

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: F) -> F:
    """The function, called but not traced by torch.compile, which compiles the code around it.

    A cache counts its tokens on the host: traced, each new count would cause a compilation.
    """
    hidden: F = torch.compiler.disable(function)
    # neither is promised to stay
    compiling = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    skip = getattr(torch._dynamo.decorators, "skip", None)
    if compiling is None or skip is None:
        return hidden

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        # `hidden` takes the host some microseconds, and eager steps call five of these per layer
        return function(*args, **kwargs) if compiling() is None else hidden(*args, **kwargs)

    # like `hidden`, it breaks the graph and is not compiled itself
    return cast(F, skip(called))


def ordinary(method: Callable[P, R]) -> Callable[P, R]:
    """No gradients, and ordinary tensors also under `torch.inference_mode`: a cache may be written again outside it."""
    guarded = torch.inference_mode(False)(torch.no_grad()(method))

    @functools.wraps(method)
    def stores(*args: P.args, **kwargs: P.kwargs) -> R:
        # `generate` has already disabled gradients, and this is called several times per pass and layer
        plain = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        return method(*args, **kwargs) if plain else guarded(*args, **kwargs)

    return stores


def once(method: Callable[P, R]) -> Callable[P, R]:
    """A method of what is never changed: layers that ask equal ones the same get one answer, worked out once."""
    known: tuple[list[Any], list[R]] = [], []

    @functools.wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal known
        question, (asked, answers) = (*args, kwargs), known
        if question in asked:
            return answers[asked.index(question)]
        found = method(*args, **kwargs)
        # of each window one; in one assignment, as threads share them
        known = [question, *asked[:2]], [found, *answers[:2]]
        return found

    return answer


STEP = 0
"""The depth of a step that may be replayed (`ReplayableSteps`); those of the modules in it follow."""

PASS = "pass"


class Pass:
    """A pass over a cache, or an operation on it.

    what: `PASS`, or the name of an operation.
    depth: of the outermost module of the pass whose hooks tell its beginning and end; None: no hooks tell them.
    stored: which layers have begun to store; not empty once the cache may have changed.
    config: the model config that was found to name our attention, which is slow to ask.
    shown: the newest mask for an indexer, behind the 2D mask and the sizes that it was made of; None: none was made.
    """

    def __init__(self, what: str, depth: int | None):
        self.what, self.depth, self.thread = what, depth, get_ident()
        self.stored: set[Hashable] = set() if what == PASS else {what}
        self.config: Any = None
        self.shown: tuple[torch.Tensor | None, tuple[Any, ...], torch.Tensor] | None = None


class PassMark:
    """The mark of one cache, which all of its layers share. A copy of a broken cache is broken.

    Another thread may clear `now` between two reads of it: each method reads it once.

    layers: how many layers store keys and values. A pass without hooks ends when as many have stored them.
    """

    # what has begun; the attribute of the class: nothing
    now: Pass | None = None

    def __init__(self, layers: int):
        self.layers = layers
        # what is being written, or was when it broke off
        self.writing: str | None = None
        # passes and operations that have begun so far
        self.begun = 0
        # those that must agree whether NaN or Inf has been stored
        self.ranks = ALONE

    def refusal(self) -> ValueError:
        """What is raised where the mark stands."""
        now, writing = self.now, self.writing
        what = PASS if now is None else now.what
        at = "" if writing is None else f" while {writing} was written"
        return ValueError(
            f"an earlier {what} over this TurboCache broke off{at} (or it is still under way, perhaps in another "
            "thread): reset() it, or take a new one."
        )

    def _mine(self, now: Pass) -> bool:
        return now.thread == get_ident() and self.writing is None

    def require_whole(self) -> None:
        """ValueError if something has begun to change the cache, and has not ended."""
        now = self.now
        if self.writing is not None or (now is not None and now.stored):
            raise self.refusal()

    def require_unwritten(self) -> None:
        """ValueError if something is being written, or was when it broke off."""
        if self.writing is not None:
            raise self.refusal()

    def begin(self, what: str = PASS, depth: int | None = None) -> Pass:
        """A new pass or operation begins; ValueError if another one has not ended, or another thread has begun one."""
        new = Pass(what, depth)
        # of threads that begin at once, Python lets one set it
        now = vars(self).setdefault("now", new)
        if now is not new:
            if now.stored or not self._mine(now):
                raise self.refusal()
            # the former one broke off before anything had changed
            self.now = new
        self.begun += 1
        return new

    def enter(self, depth: int) -> None:
        """A module that calls all layers begins: a pass of its own, unless it is a part of the one that stands.

        depth: among such modules, the outermost first.
        """
        now = self.now
        within = now is not None and now.depth is not None and depth > now.depth
        if now is None or not within or now.stored or not self._mine(now):
            self.begin(depth=depth)

    def ends(self, depth: int) -> bool:
        """Whether the pass that stands is that of the module at this depth."""
        now = self.now
        return now is not None and now.depth == depth and self._mine(now)

    def end(self) -> None:
        """What has begun has ended as it should; not if an error in a write was caught on the way."""
        if self.writing is None:
            vars(self).pop("now", None)

    def drop(self, depth: int) -> None:
        """The pass of the module at this depth is over, perhaps by an error: if nothing was stored, there was none."""
        now = self.now
        if self.ends(depth) and now is not None and not now.stored:
            self.end()

    def turn(self, key: Hashable) -> Pass:
        """A layer begins to store, once in each pass; returns the pass. key: its number, or also the kind of a state.

        Raises:
            ValueError: this is a new pass, and the last one has not ended; or another thread uses the cache.
        """
        now = self.now
        if now is None:
            now = self.begin()
        elif now.what != PASS or key in now.stored or not self._mine(now):
            raise self.refusal()
        now.stored.add(key)
        return now

    def settle(self) -> None:
        """A layer has stored its tokens: with the last layer, a pass without hooks ends."""
        now = self.now
        if now is None or now.depth is not None or now.what != PASS:
            return
        if sum(isinstance(key, int) for key in now.stored) == self.layers:
            self.end()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        now = state.pop("now", None)
        if now is not None and (now.stored or self.writing):
            state["now"] = copy.copy(now)
            state["now"].config = None
        return state


def storing(method: F) -> F:
    """As `ordinary`, for methods of what has a `mark`, and a `name` for errors.

    While it runs, `mark.writing` is set, and the mark stands; an exception leaves both.
    """
    stores = ordinary(method)

    @functools.wraps(method)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark: PassMark = self.mark
        now = mark.now
        if now is None:
            mark.begin("call")
        elif now.thread != get_ident():
            raise mark.refusal()
        # calls may be nested
        mark.writing, before = self.name, mark.writing
        result = stores(self, *args, **kwargs)
        mark.writing = before
        if now is None:
            mark.end()
        return result

    return cast(F, marked)
