"""Triton's interpreter without a third of its time, in which it patches its language anew at each call in a kernel."""

import functools
from typing import Any


def quicken() -> None:
    """Let a kernel's launch patch each part of the language once: what its functions patch again is patched already."""
    from triton.runtime import interpreter  # noqa: PLC0415 - as it is chosen when it is imported

    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor")):
        # another version of Triton, which takes its time
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if hasattr(patch, "__wrapped__"):
        return
    patched: set[tuple[bool, ...]] = set()
    parts = (interpreter.tl, interpreter.tl.core)

    @functools.wraps(patch)
    def patch_once(fn: Any) -> Any:
        seen = list(map(id, fn.__globals__.values()))
        which = tuple(id(part) in seen for part in parts)
        if which in patched:
            return None
        patched.add(which)
        return patch(fn)

    @functools.wraps(launch)
    def launch_anew(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
