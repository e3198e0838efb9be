"""Decorators for methods of a cache: ordinary tensors, no tracing by torch.compile, one answer for all layers."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

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
