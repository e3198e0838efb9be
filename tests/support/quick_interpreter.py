"""Triton's interpreter without half of its time: what it does again at each call, and what nobody looks at."""

import dataclasses
import functools
from typing import Any


def quicken() -> None:
    """Let a kernel's launch patch each part of the language once: what its functions patch again is patched already.
    Leave out sums of integers in 64 bits too: they serve an assertion that only `debug` makes."""
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
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    make, known = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    @functools.wraps(make)
    def np_dtype(kind: Any) -> Any:
        # a table of all types is made at each call; pointers have no hash and no place in it
        return make(kind.scalar) if kind.scalar.is_ptr() else known(kind.scalar)

    interpreter._get_np_dtype = np_dtype
    _remember_shapes(interpreter.tl.core)


def _remember_shapes(core: Any) -> None:
    """Let blocks of one type share what describes their shape; it is checked when a type is met first."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}

    @functools.wraps(make_type)
    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    @functools.wraps(make_tensor)
    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
