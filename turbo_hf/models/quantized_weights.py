"""Quantized weights of a loaded model: which library holds them, and what that means for a patch."""

from typing import Any

import torch

from turbo_hf.errors import Unsupported

LIBRARIES = (
    "aqlm",
    "auto_gptq",
    "auto_round",
    "awq",
    "bitsandbytes",
    "compressed_tensors",
    "gptqmodel",
    "hqq",
    "optimum",
    "quark",
    "sinq",
    "spqr_quant",
    "torchao",
    "vptq",
)
"""Packages that hold weights in layers or tensors of their own."""

OWN = "transformers.integrations."
"""Where Transformers has layers of quantized weights itself."""

CAPTURED = ("torchao",)
"""Libraries whose layers may be captured although no quantizer of Transformers says so: plain operations of torch."""


def library_of(kind: type) -> str | None:
    """The library of a layer's or tensor's class, if it is one for quantized weights."""
    module = kind.__module__
    if module.startswith(OWN):
        return module.removeprefix(OWN).split(".")[0]
    first = module.split(".")[0]
    return first if first in LIBRARIES else None


def refuse_fused_attention(model: torch.nn.Module) -> None:
    """`Unsupported` if a library has put attention of its own, with its own cache, in the place of the model's."""
    for module in model.modules():
        kind, library = type(module), library_of(type(module))
        if library is not None and "Attention" in kind.__name__:
            raise Unsupported(
                f"{library} has replaced this model's attention by {kind.__name__}, which keeps a cache of its own: "
                "load it without fused modules."
            )


def why_not_captured(model: Any, module: torch.nn.Module | None = None) -> str | None:
    """Why the kernels of quantized weights cannot be captured (or compiled); None if they can.

    module: one of a model's layers, where Transformers' own quantizer has not loaded it; None: what the quantizer says.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if module is None or quantizer is not None:
        refused = quantizer is not None and not quantizer.is_compileable
        return "the kernels of its quantized weights cannot be captured" if refused else None
    library = library_of(type(module))
    if library is None or library in CAPTURED:
        return None
    return f"the kernels of its quantized weights ({library}) have not been tried in a capture"
