"""Launches of kernels that cost the host little, and a layer as their arguments. Imported only where one runs, as it
needs Triton.

Triton looks up the compiled kernel anew for each launch, and asks the driver about each pointer. Here both are done
once: a launch whose arguments differ from an earlier one's in addresses and floats alone goes straight to Triton's own
launcher, with addresses in place of tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel

from turbo_hf.layout import KVStore
from turbo_hf.ops import gpu

MOST = 1024
"""Launches that are remembered: more of them are not met again, but differ in the lengths of prompts."""

runtime = knobs.runtime

# without the check whether CUDA has begun, as tensors lie there; builds for CPUs have none
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

_known: dict[Any, tuple[CompiledKernel, tuple[Any, ...]]] = {}


def _is_watched() -> bool:
    """Whether someone hears of each launch: Triton's profiler."""
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # a chain of hooks is mostly empty
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def launch(kernel: Any, x: torch.Tensor, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)` on the device of x.

    args: the kernel's first parameters, in order: tensors, numbers, None, or tuples of them. options: its constants,
        and what Triton takes besides.
    """
    index = x.get_device()
    if index < 0:
        # the interpreter
        with torch.cuda.device_of(x):
            kernel[grid](*args, **options)
        return
    if index != _current_device():
        # of a model over several GPUs
        with torch.cuda.device_of(x):
            launch(kernel, x, grid, *args, **options)
        return
    # what Triton compiles anew for: types and alignment of tensors, integers, None, constants
    key: list[Any] = [id(kernel), index, *options.items()]
    addresses = addressed(args, key)
    found = tuple(key)
    known = _known.get(found)
    if known is None:
        compiled = kernel[grid](*args, **options)
        if isinstance(compiled, CompiledKernel):
            if len(_known) >= MOST:
                _known.clear()
            _known[found] = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
        return
    compiled, constants = known
    place, stream = (*grid, 1, 1)[:3], gpu.raw_stream(index)
    if _is_watched():
        compiled[place](*addresses, *constants, stream=stream)
    else:
        head = (*place, stream, compiled.function, compiled.packed_metadata)
        compiled.run(*head, None, None, None, *addresses, *constants)


def addressed(args: tuple[Any, ...], key: list[Any]) -> tuple[Any, ...]:
    """args with addresses in place of tensors; `key` gets what tells compiled kernels apart."""
    found: list[Any] = []
    for x in args:
        if isinstance(x, torch.Tensor):
            address = x.data_ptr()
            key += (x.dtype, address % 16)
            found.append(address)
        elif isinstance(x, tuple):
            key += (type(x), len(x))
            found.append(addressed(x, key))
        else:
            # 1 and True are one key; any two floats are one kernel
            key += (type(x), None if isinstance(x, float) else x)
            found.append(x)
    return tuple(found)


class Cache(NamedTuple):
    """Keys and values of one layer, as in `KVStore`.

    paged: (k, v, meta, size) for each bit width, as in `PagedHeads`.
    opened: (k, v, k_scale, v_scale) of the open tokens.
    cap: capacity of the open buffer in tokens.
    """

    paged: Any
    opened: Any
    cap: int


def cache_of(store: KVStore) -> Cache:
    """A layer's keys and values as kernels take them."""
    opened = (store.k_open, store.v_open, store.k_scale, store.v_scale)
    return Cache(tuple(pages[1:] for pages in store.paged), opened, store.k_open.shape[2])


class Rows(NamedTuple):
    """What kernels need of each row.

    order: int64 [B, Hkv], the KV head in each slot.
    sealed, open_len: int64 [B], sealed blocks and open tokens.
    starts: int64 [B], the first column of the queries that holds a token; None: all columns do.
    """

    order: Any
    sealed: Any
    open_len: Any
    starts: Any
