"""Hooks of the user in a captured step: the host calls them between graphs, on copies of what they would be given.

A graph repeats launches and calls no Python. So a step is cut where such a hook is called: the graph before it writes
what the hook is given, the hook runs, and what it has changed or returned is copied to where the next graph reads it.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from turbo_hf.attention.cuts import NOW, current, cutting
from turbo_hf.errors import Unsupported

PLAIN = (torch.dtype, torch.device, type(None), bool, int, float, complex, str)
"""What a hook may be given or return, besides tensors and what holds these: the same in each step."""

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
"""By model: while a step runs that may be captured, its hooks are replaced."""


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules of a model, each once. Asked in each `generate`, where torch's own walk would take milliseconds."""
    modules, known = [model], {model}
    for module in modules:
        # a module may occur in several places, or in a cycle
        held = [x for x in module._modules.values() if x is not None and x not in known]
        modules += held
        known.update(held)
    return modules


def name_of(model: torch.nn.Module, module: torch.nn.Module) -> str:
    """The name of a module of a model, for messages."""
    names = (name or "the model" for name, held in model.named_modules() if held is module)
    return next(names, type(module).__name__)


def foreign_hooks(module: torch.nn.Module, is_own: Callable[[Any], bool]) -> list[tuple[dict[int, Any], int, Any]]:
    """Hooks of a module that are the user's, as (where, number, hook). is_own: whether one is the patch's."""
    # Transformers' own hooks record outputs, and are requested by a keyword
    return [
        (hooks, number, hook)
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for number, hook in ((n, _unwrapped(x)) for n, x in hooks.items())
        if not (is_own(hook) or (getattr(hook, "__module__", None) or "").startswith("transformers."))
    ]


def _unwrapped(hook: Any) -> Any:
    return hook.hook if isinstance(hook, _Aside) else hook


class _Aside:
    """In place of one hook while a step runs that is captured or will be.

    name: of its module. where, number: of the hook among those of that module.
    """

    def __init__(
        self,
        name: str,
        where: dict[int, Any],
        number: int,
        hook: Any,
        before: bool,
        keywords: bool,
        modules: list[torch.nn.Module],
    ):
        self.where, self.number, self.hook = where, number, hook
        self.name, self._before, self._keywords = name, before, keywords
        # those of the model, until it is known whether the hook changes them
        self._modules: list[torch.nn.Module] = modules
        # why it cannot be called between graphs
        self.unfit: str | None = None

    def __call__(self, module: Any, *given: Any) -> Any:
        cut = current()
        if cut is None or cut is NOW:
            # what the hook was given, before it changes that
            strange, held = self._strange(given) or _overlap(given), [_held(x) for x in self._modules]
            leaves, form = tree_flatten(self._replaced(given))
            before = tree_unflatten(leaves, form)
            # a pass that the hook itself makes is no part of this step
            with cutting(None):
                result = self.hook(module, *given)
            if strange is None and not all(map(_same, held, map(_held, self._modules))):
                # which the next module may read, and a graph would not
                strange = "sets attributes of a module"
            self._modules = []
            if strange is None:
                strange = self._strange(before, self._replaced(given) if result is None else self._returned(result))
            self.unfit = self.unfit or strange
            return result
        target = self._replaced(given)
        leaves, form = tree_flatten(target)
        fresh = tree_unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves], form)
        cut.aside(lambda: self._call(module, given, fresh))
        return fresh

    def _call(self, module: Any, given: Any, fresh: Any) -> None:
        """The hook, between two graphs. given: what the graph before has written; fresh: what the next one reads."""
        leaves, form = tree_flatten(given)
        # one object for one, and for an alias of it
        copies: dict[Any, torch.Tensor] = {}
        for x in leaves:
            if isinstance(x, torch.Tensor) and _place(x) not in copies:
                copies[_place(x)] = x.clone()
        shown = tree_unflatten([copies[_place(x)] if isinstance(x, torch.Tensor) else x for x in leaves], form)
        with cutting(None):
            # taken away meanwhile, it is not called
            result = self.hook(module, *shown) if self.stands() else None
        for x in leaves:
            copy = copies[_place(x)] if isinstance(x, torch.Tensor) else None
            # torch does not count all changes; what is expanded, nothing can change in place
            if copy is not None and not _expanded(x):
                x.copy_(copy)
        returned = self._replaced(shown) if result is None else self._returned(result)
        strange = self._strange(fresh, returned)
        if strange is not None:
            raise Unsupported(
                f"a hook of {self.name} {strange}, which it did not in an earlier step, so that this one is a CUDA "
                "graph. Choose TurboConfig(cuda_graphs=False)."
            )
        for x, new in zip(tree_flatten(fresh)[0], tree_flatten(returned)[0], strict=True):
            if isinstance(x, torch.Tensor):
                x.copy_(new)

    def stands(self) -> bool:
        """Whether the hook has not been removed."""
        return _unwrapped(self.where.get(self.number)) is self.hook

    def _replaced(self, given: tuple[Any, ...]) -> Any:
        """The part of what it is given that takes the place of what it returns."""
        if not self._before:
            return given[-1]
        return given if self._keywords else given[0]

    def _returned(self, result: Any) -> Any:
        # as torch reads it
        return (result,) if self._before and not isinstance(result, tuple) else result

    def _strange(self, given: Any, returned: Any = None) -> str | None:
        """Why it cannot be called between graphs if it is given this, and returns that; None if it can."""
        leaves, form = tree_flatten(given)
        for x in leaves:
            if not isinstance(x, (torch.Tensor, *PLAIN)):
                return f"is given a {type(x).__name__}"
        if returned is None:
            return None
        others, other_form = tree_flatten(returned)
        if form != other_form or not all(map(_alike, leaves, others)):
            return "returns something of another form than it is given"
        return None


def _overlap(given: Any) -> str | None:
    """Why copies of what a hook is given would not change together as that does; None if they would."""
    tensors = [x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor) and x.numel()]
    places = {(x.untyped_storage().data_ptr(), _place(x)) for x in tensors}
    return "is given two views of one tensor" if len(dict(places)) < len(places) else None


def _expanded(x: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(x.shape, x.stride(), strict=True))


def _held(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    return dict(vars(module)), dict(module._parameters), dict(module._buffers), dict(module._modules)


def _same(before: tuple[dict[str, Any], ...], after: tuple[dict[str, Any], ...]) -> bool:
    """Whether each attribute is the very object that it was."""
    return all(
        old.keys() == new.keys() and all(new[name] is x for name, x in old.items())
        for old, new in zip(before, after, strict=True)
    )


def _place(x: torch.Tensor) -> Any:
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


def _alike(x: Any, other: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(other, torch.Tensor):
        return (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    return type(x) is type(other) and bool(x == other)


class Asides:
    """The user's hooks of one model, found when first asked for.

    is_own: whether a hook is the patch's. inside: whether passes are within the model's call, whose hooks then run
    around them.
    """

    def __init__(self, model: Any, is_own: Callable[[Any], bool], inside: bool = False):
        self._model, self._is_own, self._inside = model, is_own, inside
        self._found: list[_Aside] | None = None

    def found(self) -> list[_Aside]:
        """All of them."""
        if self._found is None:
            self._found, modules = [], modules_of(self._model)
            for module in modules:
                if module is self._model and self._inside:
                    continue
                for where, number, hook in foreign_hooks(module, self._is_own):
                    name, before = name_of(self._model, module), where is module._forward_pre_hooks
                    kept = module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs
                    self._found.append(_Aside(name, where, number, hook, before, number in kept, modules))
        return self._found

    def require_fit(self) -> None:
        """Raise `Unsupported` if the step before has shown that one of them cannot be called between graphs, or did not
        see one."""
        known = {(id(aside.where), aside.number) for aside in self.found()}
        for module in modules_of(self._model):
            new = [(id(where), number) for where, number, _ in foreign_hooks(module, self._is_own)]
            if not (known.issuperset(new) or (self._inside and module is self._model)):
                raise Unsupported(f"{name_of(self._model, module)} got a hook after the first step")
        for aside in self.found():
            if aside.unfit is not None and aside.stands():
                raise Unsupported(f"a hook of {aside.name} {aside.unfit}")

    @contextmanager
    def called(self) -> Iterator[None]:
        """Inside, a step may be captured: where one is, the hooks cut it. One thread at a time, if there are any."""
        if not self.found():
            yield
            return
        with _locks.setdefault(self._model, threading.RLock()):
            hooks = [aside for aside in self.found() if aside.stands()]
            before = [aside.where[aside.number] for aside in hooks]
            for aside in hooks:
                aside.where[aside.number] = aside
            try:
                yield
            finally:
                for aside, hook in zip(hooks, before, strict=True):
                    # not one that was removed meanwhile
                    if aside.where.get(aside.number) is aside:
                        aside.where[aside.number] = hook
