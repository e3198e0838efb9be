"""Whether a cache is whole: which pass or call has begun to change it, and has not ended.

A pass that breaks off leaves a mark, wherever the exception came from: marks are set before a change and cleared after
it, not in an exception handler, which Ctrl-C or a second error would cut short. The next use finds the mark and raises
an error. (A handler may clear a mark that it has made good: `ReplayableSteps.recount`.)
"""

import copy
from collections.abc import Iterable, Mapping
from threading import get_ident
from typing import Any

import torch

from turbo_hf.ranks import ALONE

RESET = "reset() it, or take a new one."
TAKEN = f"another thread has begun to use this TurboCache, or broke off there: {RESET}"
STEP = 0
"""The depth of a step that may be replayed (`ReplayableSteps`); those of the modules in it follow."""

READ = "read "
"""Kinds that begin so note that a layer's state was taken."""


class Pass:
    """A forward pass over a cache, or an operation on all of its layers.

    announced: hooks call when it begins and ends; else it has ended once every layer has stored its tokens.
    operation: its name; "" for a forward pass.
    """

    def __init__(self, announced: bool = False, operation: str = "", ended: bool = False):
        self.announced, self.operation, self.ended = announced, operation, ended
        # it broke off before any layer had changed
        self.failed = False
        self.thread = get_ident()
        # modules that have announced it and not returned, by their depth
        self.calls: list[int] = []
        # whether the innermost of them may call others: a replayed step calls none, and what comes next is a new pass
        self.nests = True
        # what each layer held that has begun to store new tokens, by layer and kind of state: columns, else 0
        self.done: dict[tuple[int, str], int] = {}
        # states that were taken, by the same, and their versions then: who takes one may change it in place
        self.taken: dict[tuple[int, str], list[tuple[torch.Tensor, int]]] = {}
        # the layer whose new tokens are on their way to it, and the one whose turn has begun and not ended
        self.claimed: int | None = None
        self.at: int | None = None
        # which names our attention: a config is slow to ask, and not asked for each layer
        self.config: Any = None
        # whoever comes after it: of several threads, the first in this list
        self.later: list[Pass] = []

    def knows(self, config: Any) -> bool:
        """Whether this pass is under way, and a layer with this config has been found to call our attention in it."""
        return self.config is config and self.announced and not self.ended


class Integrity:
    """The marks of one cache, which all of its layers share. A copy of a broken cache is broken.

    Args:
        layers: for each layer that stores anything, its class.
    """

    def __init__(self, layers: Mapping[int, str]):
        self.layers = dict(layers)
        # those that must agree whether NaN or Inf has been stored
        self.ranks = ALONE
        self.forget()

    def forget(self) -> None:
        """Clear all marks: the cache is whole."""
        # what is being written, or was when it broke off
        self.writing: str | None = None
        self.last = Pass(ended=True)

    def _why_broken(self, last: Pass) -> str | None:
        """What has begun and not ended, as a sentence with its remedy; None: the cache is whole."""
        if self.writing is not None:
            return self._why_torn()
        return TAKEN if last.later else self._why_unfinished(last)

    def _why_unfinished(self, last: Pass) -> str | None:
        """What of the last pass or operation has not ended, as a sentence with its remedy; None: nothing."""
        if last.ended:
            return None
        if last.operation:
            return f"an earlier {last.operation}() of this TurboCache broke off midway: {RESET}"
        stored = {layer for layer, kind in last.done if last.announced or _changed(last, layer, kind, surely=False)}
        if last.at is None and last.claimed is None and (not stored or (not last.announced and self._complete(last))):
            return None
        return (
            f"an earlier pass over this TurboCache broke off when {len(stored)} of its {len(self.layers)} layers held "
            f"its tokens (or another thread still runs it). roll_back() takes them back where it can; or {RESET}"
        )

    def _why_torn(self) -> str:
        return (
            f"{self.writing} of this TurboCache was being written when an earlier pass or call broke off (or another "
            f"thread is writing it): {RESET}"
        )

    def _complete(self, last: Pass) -> bool:
        """Whether every layer has stored the tokens of a pass that announces no end."""
        kinds: dict[int, set[str]] = {layer: set() for layer in self.layers}
        newest = next(reversed(last.done), (None, ""))[0]
        for layer, kind in last.done:
            if layer == newest and not _changed(last, layer, kind, surely=True):
                return False
            if layer in kinds:
                kinds[layer].add(kind)
        # layers of one class store the same kinds of state, which are known once one has stored them
        alike: dict[str, set[str]] = {}
        for layer, seen in kinds.items():
            stored = {kind for kind in seen if kind and not kind.startswith(READ)}
            if not seen or alike.setdefault(self.layers[layer], stored) != stored:
                return False
        return True

    def require_whole(self) -> None:
        """ValueError if a pass or call has begun to change the cache, and has not ended."""
        broken = self._why_broken(self.last)
        if broken is not None:
            raise ValueError(broken)

    def idle(self) -> bool:
        """Whether nothing is being written, and no pass or call is under way or has broken off."""
        return self.writing is None and self.last.ended and not self.last.later

    def require_untorn(self) -> None:
        """ValueError if something was being written when a pass or call broke off."""
        if self.writing is not None:
            raise ValueError(self._why_torn())

    def require_unclaimed(self) -> None:
        """ValueError if the new tokens of a layer were on their way to it when a pass broke off."""
        if self.last.claimed is not None:
            self.require_whole()

    def begin(self, announced: bool = False, operation: str = "") -> Pass:
        """A new pass or operation; ValueError as in `require_whole`."""
        last, new = self.last, Pass(announced, operation)
        broken = self._why_broken(last)
        if broken is not None:
            raise ValueError(broken)
        # what another thread has read of the cache must not change until that thread stores
        used = last.announced and not last.ended and last.thread != new.thread
        if not used:
            last.later.append(new)
        if used or last.later[0] is not new:
            raise ValueError(TAKEN)
        self.last = new
        return new

    def enter(self, depth: int, nests: bool = True) -> None:
        """A module that calls all layers begins. depth: among those that do, the outermost first. nests: see `Pass`."""
        last = self.last
        within = not (last.ended or last.done) and last.nests and last.calls and last.calls[-1] < depth
        if not (within and last.thread == get_ident()):
            last = self.begin(announced=True)
        last.calls.append(depth)
        last.nests = nests

    def leave(self, depth: int) -> None:
        """The module has returned, without an exception."""
        last = self.last
        if last.calls and last.calls[-1] == depth and last.thread == get_ident():
            last.calls.pop()
            last.ended, last.failed = not last.calls, False

    def abandon(self, depth: int) -> None:
        """The module has returned, perhaps with an exception, which leaves no trace if it came before all changes."""
        last = self.last
        touched = last.done or last.at is not None or last.claimed is not None or self.writing is not None
        if depth in last.calls and last.thread == get_ident() and not touched:
            last.ended = last.failed = True

    def again(self, depth: int) -> None:
        """The module's call did not run, and is repeated."""
        last = self.last
        if last.calls[:1] == [depth]:
            last.calls, last.done, last.at, last.nests = [depth], {}, None, True

    def over(self, depth: int) -> None:
        """The module's call has returned, perhaps with an exception; the module makes no other."""
        last = self.last
        if last.calls[:1] == [depth]:
            last.nests = False

    def claim(self, layer: int) -> None:
        """The hook has claimed the layer: its new tokens are on their way to it."""
        self.last.claimed = layer

    def unclaim(self, layer: int) -> None:
        """The new tokens have reached the layer, or will not."""
        if self.last.claimed == layer:
            self.last.claimed = None

    def turn(self, layer: int, held: int, kind: str = "") -> None:
        """A layer, which holds `held` columns, begins to store new ones, or another kind of state; `settle` ends it.

        Raises:
            ValueError: this is a new pass, as the layer has had its turn, and the last one has not ended.
        """
        self.unclaim(layer)
        last, key = self.last, (layer, kind)
        again = key in last.done or (not last.announced and _left(last, layer))
        other = last.ended or last.operation or last.thread != get_ident()
        if other or again or last.claimed is not None:
            last = self.begin()
        # in this order: a layer noted as done that has not begun would count as one that has stored
        last.at = layer
        last.done[key] = held

    def settle(self, layer: int) -> None:
        """The layer's turn has ended."""
        if self.last.at == layer:
            self.last.at = None

    def read(self, layer: int, kind: str, states: Iterable[torch.Tensor | None]) -> None:
        """A model takes a layer's states, which it may then change in place.

        Raises:
            ValueError: this is a new pass, as the layer has had its turn, and the last one has not ended.
        """
        last, key = self.last, (layer, READ + kind)
        stored = any(held == layer and kind and not kind.startswith(READ) for held, kind in last.done)
        # reading alone begins no pass
        again = (key in last.done and _changed(last, *key, surely=False)) or (stored and not last.announced)
        if last.ended or last.operation or again or last.thread != get_ident():
            last = self.begin()
        if not last.announced:
            counted = [state for state in states if state is not None and not state.is_inference()]
            last.taken[key] = [(state, state._version) for state in counted]
        last.done[key] = 0

    def before(self) -> dict[tuple[int, str], int]:
        """Of the pass that broke off, `Pass.done`; {} if none did.

        Raises:
            ValueError: it broke off while something was written, or was no forward pass. What it changed is not known.
        """
        self.require_untorn()
        unfinished = self._why_unfinished(self.last)
        if unfinished is not None and self.last.operation:
            raise ValueError(unfinished)
        return {} if unfinished is None else dict(self.last.done)

    def __getstate__(self) -> dict[str, Any]:
        # a copied tensor has a version counter of its own, which says nothing about changes
        whole = self._why_broken(self.last) is None
        last = Pass(ended=True) if whole else copy.copy(self.last)
        last.taken, last.config = {}, None
        return {**vars(self), "last": last}


def _left(last: Pass, layer: int) -> bool:
    """Whether another layer has stored tokens since this one did."""
    stored = [at for at, kind in last.done if not kind.startswith(READ)]
    return layer in stored and stored[-1] != layer


def _changed(last: Pass, layer: int, kind: str, surely: bool) -> bool:
    """Whether a layer's state of a kind has changed since the pass began; where that is not known, not `surely`."""
    if not kind.startswith(READ) or (layer, kind.removeprefix(READ)) in last.done:
        return True
    taken = last.taken.get((layer, kind), [])
    if any(state._version != version for state, version in taken):
        return True
    # kernels other than torch's own need not count versions
    return not surely and not (taken and all(state.is_cpu for state, _ in taken))
