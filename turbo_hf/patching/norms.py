"""RMSNorm modules that compute in one launch, where Transformers' take eight: of a step of a small model, a third.

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


FORMS = (Form(0, early=True), Form(0, early=False), Form(1, early=False))
"""Of Llama, OLMo 2 and Gemma."""


class Fused:
    """What classes of fused modules have in common. unfused: the class that the module had."""

    unfused: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = tuple(super().__reduce_ex__(protocol))
        # as protocol 1 makes an object of a class
        return copyreg._reconstructor, (self.unfused, object, None), *rest  # type: ignore[attr-defined]


@functools.cache
def _fused(kind: Any, form: Form, weighted: bool) -> type:
    """The class of fused modules of a kind. weighted: whether they have a weight."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """By the kernel if that serves this call, else, and where a compiler traces, by the module's own method."""
        traced = torch.compiler.is_compiling()
        weight = self.weight if weighted and not traced else None
        if traced or len(args) != 1 or kwargs or not _served(args[0], weight):
            return kind.forward(self, *args, **kwargs)
        from turbo_hf.ops.kernel_norm import launch_rms_norm  # noqa: PLC0415 - needs Triton

        return launch_rms_norm(args[0], weight, _epsilon(self), *form)

    same = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Fused, kind), {**same, "unfused": kind})


def _served(x: Any, weight: torch.Tensor | None) -> bool:
    """Whether the kernel computes this: on a GPU, without gradients."""
    if type(x) is not torch.Tensor or not x.is_cuda or torch.is_grad_enabled():
        return False
    if weight is not None and (type(weight.data), weight.dtype, weight.device) != (torch.Tensor, x.dtype, x.device):
        return False
    return gpu.why_no_kernels_on(x.device) is None


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
        if "RMSNorm" not in kind.__name__ or isinstance(module, Fused) or "forward" in vars(module):
            continue
        key = kind, _epsilon(module), None if weight is None else tuple(weight.shape)
        if key not in forms:
            forms[key] = form_of(module)
        form = forms[key]
        if form is not None:
            found.append((module, _fused(kind, form, weight is not None)))
    return found


def restore_norms(modules: Iterable[torch.nn.Module]) -> None:
    """Give the modules the classes back that they had."""
    for module in modules:
        if isinstance(module, Fused):
            module.__class__ = module.unfused


@torch.no_grad()
def form_of(module: torch.nn.Module) -> Form | None:
    """What an RMSNorm module computes, by its own results for random numbers, some of them as small as its epsilon, of
    which they then depend; None: nothing that the kernel knows."""
    weight, eps = module._parameters.get("weight"), _epsilon(module)
    strange = set(module._parameters) - {"weight"} or module._modules or module._buffers
    if strange or not isinstance(eps, float) or (weight is not None and weight.dim() != 1):
        return None
    generator, size = torch.Generator("cpu").manual_seed(0), 64 if weight is None else len(weight)
    numbers = torch.randn(9, size, generator=generator, device="cpu").bfloat16()
    sizes = torch.tensor([eps**0.5, eps**0.5, eps**0.5, eps**0.5, 1, 30, 1e3, 1e5], device="cpu").bfloat16()
    x, drawn = numbers[:8] * sizes[:, None], None if weight is None else numbers[8]
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
