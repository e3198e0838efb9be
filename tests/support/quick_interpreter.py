"""Triton's interpreter without most of its time: what it does again at each call, and what nobody looks at."""

import copy
import dataclasses
import functools
from typing import Any


def quicken() -> None:
    """Let a kernel's launch patch each part of the language once: what its functions patch again is patched already.
    Leave out sums of integers in 64 bits too: they serve an assertion that only `debug` makes."""
    from triton.runtime import interpreter  # noqa: PLC0415 - as it is chosen when it is imported

    names = ("_patch_lang", "_patch_attr", "GridExecutor", "ReduceOps", "TensorHandle", "interpreter_semantic")
    if not all(hasattr(interpreter, name) for name in names):
        # another version of Triton, which takes its time
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if hasattr(patch, "__wrapped__"):
        return
    patched: set[tuple[bool, ...]] = set()
    parts = (interpreter.tl, interpreter.tl.core)

    @functools.cache
    def parts_of(fn: Any) -> tuple[bool, ...]:
        seen = list(map(id, fn.__globals__.values()))
        return tuple(id(part) in seen for part in parts)

    @functools.wraps(patch)
    def patch_once(fn: Any) -> Any:
        which = parts_of(fn)
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
    _call_directly(interpreter)
    _take_operands_as_they_are(interpreter)
    _reduce_by_halves(interpreter)


def _remember_shapes(core: Any) -> None:
    """Let blocks of one shape share what describes it; it is checked when a type is met first."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    alike: dict[tuple[int, ...], tuple[Any, Any]] = {}

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
            shape = tuple(size.value for size in self.shape)
            shapes[type.name] = alike.setdefault(shape, (self.shape, self.numel))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _call_directly(interpreter: Any) -> None:
    """Let what the language offers be called without the check that a compiler calls it, which is none here."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    checked = core.builtin(lambda: None).__code__

    @functools.cache
    def direct(member: Any) -> Any:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    interpreter._patch_attr = lambda obj, name, member, _, scope: scope.set_attr(obj, name, direct(member))


def _take_operands_as_they_are(interpreter: Any) -> None:
    """Let NumPy broadcast the operands of an operation: the language's rules only say of which type they then are."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    broadcast, converting = semantic.broadcast_impl_value, copy.copy(semantic)
    converting.broadcast_impl_value = lambda lhs, rhs: (lhs, rhs)
    types: dict[tuple[str, str], tuple[Any, Any]] = {}

    def operands(
        lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        alike = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor) and lhs.dtype is rhs.dtype
        # quotients of 16-bit floats are made in 32 bits, and pointers have no sums
        if not alike or div_or_mod or lhs.dtype.is_ptr():
            lhs, rhs = converting.binary_op_type_checking_impl(
                lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
            )
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in types:
            types[key] = tuple(x.type for x in broadcast(lhs, rhs))
        return tuple(
            x if x.type.name == kind.name else core.tensor(x.handle, kind)
            for x, kind in zip((lhs, rhs), types[key], strict=True)
        )

    semantic.binary_op_type_checking_impl = operands
    cached = functools.cache(semantic.computation_type_impl)
    semantic.computation_type_impl = converting.computation_type_impl = cached
    # what is asked of each result is asked in `binary_op`, too
    interpreter.TensorHandle.__post_init__ = lambda handle: None


def _reduce_by_halves(interpreter: Any) -> None:
    """Let a reduction by a function of one's own take half of its values at once, and not each by itself."""
    one_by_one = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self: Any, values: Any) -> Any:
        parts, kinds = [x.handle.data for x in values], [x.dtype for x in values]
        if self.axis is None or self.keep_dims or parts[0].shape[self.axis] & (parts[0].shape[self.axis] - 1):
            return one_by_one(self, values)
        parts = [x.swapaxes(0, self.axis) for x in parts]
        while len(parts[0]) > 1:
            # neighbours, so that their order stays
            pairs = [x[first::2] for first in (0, 1) for x in parts]
            found = self.combine_fn.fn(*map(self.to_tensor, pairs, kinds * 2))
            parts = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
        whole = [x.swapaxes(0, self.axis).squeeze(self.axis) for x in parts]
        return [self.to_tensor(x if x.ndim else x.item(), kind) for x, kind in zip(whole, kinds, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce
