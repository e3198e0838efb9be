"""Gluon kernels in numpy: Triton's interpreter knows no Gluon, and these kernels need a GPU that CI may lack.

Layouts mean nothing here, and threads run in step: what it shows is arithmetic, addresses (none out of bounds) and the
bits of inline assembly. Races and registers it does not show.
"""

import operator
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def bare(x: Any) -> Any:
    return x.v if isinstance(x, Block) else x


class Dtype:
    def __init__(self, kind: Any) -> None:
        self.kind = np.dtype(kind)


class Pointer:
    """An address in an array: a number, or a block of numbers."""

    def __init__(self, array: Any, offset: Any = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.array, self.offset + np.asarray(bare(other)).astype(np.int64))

    def to(self, kind: Dtype) -> "Pointer":
        return Pointer(self.array.view(kind.kind), self.offset)


class Block:
    """A tensor, or a number that the kernel has computed."""

    def __init__(self, v: Any) -> None:
        self.v = np.asarray(v)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.v.shape

    def __getitem__(self, key: Any) -> "Block":
        return Block(self.v[key])

    def to(self, kind: Dtype) -> "Block":
        return Block(self.v.astype(kind.kind))

    def reshape(self, shape: Any) -> "Block":
        return Block(self.v.reshape(shape))

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def __bool__(self) -> bool:
        return bool(self.v)

    def __index__(self) -> int:
        return int(self.v)


def _binary(compute: Callable[[Any, Any], Any], turned: bool) -> Callable[[Block, Any], Any]:
    def call(one: Block, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        # a Python number takes the type of the tensor beside it
        x = one.v
        y = x.dtype.type(other) if isinstance(other, int | float) else bare(other)
        return Block(compute(y, x) if turned else compute(x, y))

    return call


def _divided(x: Any, y: Any) -> Any:
    """Division of integers as in C."""
    return (np.abs(x) // np.abs(y) * np.sign(x) * np.sign(y)).astype(np.asarray(x).dtype)


for name, compute in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "lt": operator.lt,
    "gt": operator.gt, "le": operator.le, "eq": operator.eq, "and": operator.and_, "rshift": operator.rshift,
    "floordiv": _divided, "mod": lambda x, y: x - _divided(x, y) * y,
}.items():  # fmt: skip
    setattr(Block, f"__{name}__", _binary(compute, False))
    setattr(Block, f"__r{name}__", _binary(compute, True))


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def index(self, i: Any) -> "Shared":
        return Shared(self.array[int(bare(i))])

    def permute(self, order: Any) -> "Shared":
        return Shared(self.array.transpose(order))

    def store(self, x: Block) -> None:
        assert (self.array.shape, self.array.dtype) == (x.shape, x.v.dtype)
        self.array[...] = x.v

    def _reinterpret(self, kind: Dtype, shape: Any, layout: Any) -> "Shared":
        assert self.array.flags.c_contiguous
        return Shared(self.array.reshape(-1).view(kind.kind)[: np.prod(shape)].reshape(shape))


def _wide(x: Any) -> Any:
    return np.asarray(bare(x)).astype(np.int64) & 0xFFFFFFFF


def _halves(x: Any) -> Any:
    return np.stack((x & 0xFFFF, x >> 16), -1).astype(np.uint16).view(np.float16).astype(np.float64)


def _packed(x: Any) -> Any:
    # what was never copied may be any number
    with np.errstate(over="ignore"):
        words = np.ascontiguousarray(x.astype(np.float16)).view(np.uint16).astype(np.int64)
    return words[..., 0] | words[..., 1] << 16


def _prmt(a: Any, b: Any, chosen: Any) -> Any:
    held = [x >> 8 * i & 255 for x in (a, b) for i in range(4)]
    which = int(chosen.flat[0])
    return sum(held[which >> 4 * i & 7] << 8 * i for i in range(4))


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "xor.b32": operator.xor,
    "and.b32": operator.and_,
    "prmt.b32": _prmt,
    "add.rn.f16x2": lambda a, b: _packed(_halves(a) + _halves(b)),
    "mul.rn.f16x2": lambda a, b: _packed(_halves(a) * _halves(b)),
    "fma.rn.f16x2": lambda a, b, c: _packed(_halves(a) * _halves(b) + _halves(c)),
}


def _assembly(text: str, constraints: str, given: Any, **options: Any) -> Any:
    if "spin" in text:
        return None
    results = constraints.count("=")
    shape = np.broadcast_shapes(*(np.shape(bare(x)) for x in given))
    held = {f"${results + i}": np.broadcast_to(_wide(x), shape) for i, x in enumerate(given)}
    for line in filter(None, (part.strip(" {}") for part in text.split(";"))):
        name, operands = line.split(" ", 1)
        if name != ".reg":
            to, *of = (x.strip() for x in operands.split(","))
            values = [np.broadcast_to(held[x] if x in held else np.int64(int(x, 0)), shape) for x in of]
            held[to] = INSTRUCTIONS[name](*values)
    out = [Block(held[f"${i}"].astype(np.uint32).view(np.int32)) for i in range(results)]
    return out[0] if results == 1 else tuple(out)


def _load(p: Pointer, mask: Any = True, other: Any = 77) -> Block:
    at, live = np.broadcast_arrays(np.asarray(p.offset), bare(mask))
    assert ((at[live] >= 0) & (at[live] < p.array.size)).all(), "out of bounds"
    out = np.full(at.shape, other).astype(p.array.dtype)
    out[live] = p.array[at[live]]
    return Block(out)


def _store(p: Pointer, x: Block, mask: Any = True) -> None:
    at, live, values = np.broadcast_arrays(np.asarray(p.offset), bare(mask), bare(x))
    assert ((at[live] >= 0) & (at[live] < p.array.size)).all(), "out of bounds"
    p.array[at[live]] = values[live]


def _product(a: Shared, b: Shared, acc: Block, use_acc: bool = True, is_async: bool = False) -> Block:
    out = a.array.astype(np.float32) @ b.array.astype(np.float32)
    return Block(out + acc.v if use_acc else out)


def _layout(*sizes: Any, **options: Any) -> None:
    return None


def kernel_in_numpy(path: Path, name: str) -> Callable[..., None]:
    """A Gluon kernel of a file, to be called as kernel(grid, *arguments, **constants), tensors as `Pointer`."""
    program, programs = [0, 0, 0], [1, 1, 1]
    shared = SimpleNamespace(get_default_for=_layout)
    gl = SimpleNamespace(
        constexpr=lambda x: x, pointer_type=lambda kind: kind, inline_asm_elementwise=_assembly,
        program_id=lambda i: Block(np.int32(program[i])), num_programs=lambda i: Block(np.int32(programs[i])),
        load=_load, store=_store, thread_barrier=lambda: None, convert_layout=lambda x, to: x,
        arange=lambda a, b, layout: Block(np.arange(a, b, dtype=np.int32)),
        full=lambda shape, x, kind, layout: Block(np.full(shape, x, kind.kind)),
        zeros=lambda shape, kind, layout: Block(np.zeros(shape, kind.kind)),
        full_like=lambda x, y: Block(np.full(x.shape, y).astype(x.v.dtype)),
        broadcast=lambda x, y: (Block(np.broadcast_to(x.v, np.broadcast_shapes(x.shape, y.shape))), y),
        join=lambda x, y: Block(np.stack((x.v, y.v), -1)), abs=lambda x: Block(np.abs(x.v)),
        maximum=lambda x, y: Block(np.maximum(bare(x), bare(y))),
        minimum=lambda x, y: Block(np.minimum(bare(x), bare(y))),
        max=lambda x, dim: Block(x.v.max(dim)), sum=lambda x, dim: Block(x.v.sum(dim, dtype=x.v.dtype)),
        where=lambda c, x, y: Block(np.where(c.v, bare(x), bare(y)).astype(x.v.dtype)),
        exp2=lambda x: Block(np.exp2(x.v)), log2=lambda x: Block(np.log2(x.v)),
        BlockedLayout=_layout, SliceLayout=_layout, NVMMADistributedLayout=_layout, NVMMASharedLayout=shared,
        # what nobody has stored is no number
        allocate_shared_memory=lambda kind, shape, to: Shared(np.full(shape, 91).astype(kind.kind)),
        **{kind: Dtype(kind) for kind in ("int8", "int32", "int64", "float16", "float32")},
    )  # fmt: skip

    def jit(function: Any = None, **options: Any) -> Any:
        return function or (lambda same: same)

    def waited(count: int, deps: Any) -> Any:
        return deps[0] if len(deps) == 1 else tuple(deps)

    given: dict[str, Any] = {
        "gl": gl, "gluon": SimpleNamespace(jit=jit), "warpgroup_mma": _product,
        "fence_async_shared": lambda: None, "warpgroup_mma_wait": waited,
    }  # fmt: skip
    text = re.sub(r"^from triton.*?(\(.*?\))?$", "", path.read_text("utf-8"), flags=re.M | re.S)
    exec(compile(text, str(path), "exec"), given)

    def run(grid: Iterable[int], *arguments: Any, **constants: Any) -> None:
        programs[:] = grid
        for at in np.ndindex(*programs):
            program[:] = at
            given[name](*arguments, **constants)

    return run
