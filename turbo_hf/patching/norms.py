"""RMSNorm modules that compute in one launch. Transformers' take eight, a third of the time of a small model's step.

A module keeps its weight, its hooks and its name; its class becomes a subclass with another `forward`. Copies and
pickles of it are of the class that it had.
"""

import copyreg
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from turbo_hf.ops import gpu
from turbo_hf.ops.maths import reference_norm

AGREE = 0.99
"""Share of 16-bit numbers that are the same by a formula and by a module, from which the module computes that: the
order of sums may round a few otherwise. Where the weight is rounded at another place, a quarter or more differ."""


class Form(NamedTuple):
    """What a module multiplies normalized numbers by. plus: added to the weight. early: whether the numbers are rounded
    to the input's dtype before."""

    plus: int
    early: bool


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of numbers and weights that the kernel reads."""

BARE = frozenset(vars(torch.nn.Module()))
"""Attributes of every module."""

FORMS = (Form(0, early=True), Form(0, early=False), Form(1, early=False))
"""Of Llama, OLMo 2 and Gemma."""


class FusedNorm:
    """What classes of fused modules have in common. unfused: the class that the module had."""

    unfused: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = tuple(super().__reduce_ex__(protocol))
        # as protocol 1 makes an object of a class
        return copyreg._reconstructor, (self.unfused, object, None), *rest  # type: ignore[attr-defined]


@functools.cache
def _fused(kind: Any, form: Form, weighted: bool) -> type:
    """The class of fused modules of a kind. weighted: whether they have a weight."""

    # with its signature, which others ask for
    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # where a compiler traces, and where the kernel does not serve this call, the module's own method computes
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        weight = self.weight if weighted and not traced else None
        if traced or len(args) != 1 or kwargs or not _served(args[0], weight):
            return kind.forward(self, *args, **kwargs)
        from turbo_hf.ops.kernel_norm import launch_rms_norm  # noqa: PLC0415 - needs Triton

        return launch_rms_norm(args[0], weight, _epsilon(self), *form)

    same = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (FusedNorm, kind), {**same, "unfused": kind})


def _served(x: Any, weight: torch.Tensor | None) -> bool:
    """Whether the kernel computes this: on a GPU, without gradients. Autocast may want another dtype."""
    if type(x) is not torch.Tensor or not x.is_cuda or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    return fits(x, weight) and gpu.why_no_kernels_on(x.device) is None


def fits(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the kernel can read both: in one dtype that it computes, on one device, a number for each channel."""
    if weight is None or x.dtype not in DTYPES:
        return x.dtype in DTYPES
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.stride() != (1,):
        return False
    return (weight.dtype, weight.device, weight.shape) == (x.dtype, x.device, x.shape[-1:])


def _epsilon(module: Any) -> Any:
    return vars(module).get("variance_epsilon", vars(module).get("eps"))


def fused_norms(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, type]]:
    """Those of the modules that are RMSNorm, each with the class by which it computes in one launch where a kernel
    runs."""
    found: list[tuple[torch.nn.Module, type]] = []
    forms: dict[Any, Form | None] = {}
    for module in modules if gpu.TRITON_FOUND else ():
        kind: Any = type(module)
        weight = module._parameters.get("weight")
        if "RMSNorm" not in kind.__name__ or isinstance(module, FusedNorm) or "forward" in vars(module):
            continue
        key = kind, None if weight is None else tuple(weight.shape), _settings(module)
        if key not in forms:
            forms[key] = form_of(module)
        form = forms[key]
        if form is not None:
            found.append((module, _fused(kind, form, weight is not None)))
    return found


def restore_norms(norms: Iterable[tuple[Any, Any]]) -> None:
    """Give modules the classes back that they had, but for those that have got another one since."""
    for module, kind in norms:
        if type(module) is kind:
            module.__class__ = kind.unfused


def _settings(module: torch.nn.Module) -> tuple[Any, ...]:
    """Of two modules of a class that have the same: they compute the same."""
    known = {name: value for name, value in vars(module).items() if name not in BARE}
    return tuple((name, x if isinstance(x, int | float | str | None) else id(x)) for name, x in known.items())


@torch.no_grad()
def form_of(module: torch.nn.Module) -> Form | None:
    """What an RMSNorm module computes, by its own results for random numbers, some of them as small as its epsilon, of
    which they then depend; None: nothing that the kernel knows."""
    weight, eps = module._parameters.get("weight"), _epsilon(module)
    strange = (set(module._parameters) - {"weight"}) | set(module._modules) | set(module._buffers)
    strange |= {name for name, x in vars(module).items() if isinstance(x, torch.Tensor)}
    if strange or not isinstance(eps, float) or (weight is not None and weight.dim() != 1):
        return None
    # a prime: no groups of channels fit
    generator, size = torch.Generator("cpu").manual_seed(0), 67 if weight is None else len(weight)
    numbers = torch.randn(9, size, generator=generator, device="cpu").bfloat16()
    sizes = torch.tensor([eps**0.5, eps**0.5, eps**0.5, eps**0.5, 1, 30, 1e3, 1e5], device="cpu").bfloat16()
    # of three dimensions, so that the last is not the second
    x, drawn = (numbers[:8] * sizes[:, None]).view(2, 4, size), None if weight is None else numbers[8]
    twin: Any = object.__new__(type(module))
    # the same settings over another weight
    twin.__dict__ = {**vars(module), "_parameters": {} if drawn is None else {"weight": drawn}}
    try:
        got: Any = type(module).forward(twin, x)
    except Exception:  # whatever it needs besides
        return None
    if not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (x.shape, x.dtype):
        return None
    same = {form: (got == reference_norm(x, drawn, eps, *form)).float().mean().item() for form in FORMS}
    return next((form for form in FORMS if same[form] >= AGREE), None)
