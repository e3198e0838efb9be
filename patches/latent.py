"""Multi-head latent attention (MLA): its modules hand latents on, instead of keys and values made of them."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

EXPAND = "expand_kv"
"""The method of attention modules that makes keys and values of latents."""


def keep_latent(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `expand_kv` on a patched model: latent [B, 1, N, rank] and rotary part [B, 1, N, R] as they are.

    With another attention than the patch's: keys and values, as the class makes them.
    """
    # the name under which the patch registers its attention (`turbo_attention.NAME`)
    if module.config._attn_implementation != "turbo_hf":
        return expanded(module, latent, rotary)
    return latent, rotary


def keeps_latent(module: Any) -> bool:
    """Whether this attention module hands latents to its attention function (`keep_latent`)."""
    return EXPAND in vars(module)


def expanded(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, H, N, nope + R] and values [B, H, N, Dv] of latents, by the module's own class."""
    keys, values = getattr(type(module), EXPAND)(module, latent, rotary)
    return keys, values


def why_not_absorbed(module: Any) -> str | None:
    """Why the up-projections of this module cannot be multiplied into queries and outputs; None if they can."""
    up: Any = getattr(module, "kv_b_proj", None)
    if not hasattr(type(module), EXPAND) or not type(module).__module__.startswith("transformers.models."):
        return "latent attention of a class that is not known here"
    weight: Any = getattr(up, "weight", None)
    plain = type(up) is torch.nn.Linear and isinstance(weight, torch.Tensor) and weight.is_floating_point()
    plain = is_fp8(up) or (plain and weight.element_size() >= 2)
    if not plain or up.bias is not None:
        return f"its kv_b_proj is no plain Linear without a bias, but {type(up).__name__}: load it unquantized"
    # a model on the meta device alone has no hook of accelerate
    if hasattr(up, "_hf_hook") and weight.is_meta:
        return "the weights of its kv_b_proj are offloaded: load the model without a device_map that offloads"
    if up._forward_hooks or up._forward_pre_hooks:
        return "its kv_b_proj has hooks, which steps over latents would not call: remove them"
    return None


def is_fp8(up: Any) -> bool:
    """Whether it is a Linear of Transformers' fine-grained FP8, with a scale per block of weights or one scale."""
    known = type(up).__name__ == "FP8Linear" and type(up).__module__.startswith("transformers.integrations.")
    return known and up.weight.dtype == torch.float8_e4m3fn


_Made = tuple[tuple[Any, ...], torch.Tensor]

_weights: WeakKeyDictionary[torch.nn.Module, _Made] = WeakKeyDictionary()
"""What dequantized weights were made of, and the weights."""


def up_weight(up: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of an up-projection, of FP8 dequantized to `dtype`: once, until it changes."""
    weight: torch.Tensor = up.weight
    if not is_fp8(up):
        return weight
    scale = up.weight_scale_inv
    # tensors of inference mode have no version
    versions = [None if x.is_inference() else x._version for x in (weight, scale)]
    source = (weight.data_ptr(), scale.data_ptr(), weight.device, dtype, *versions)
    if up in _weights and _weights[up][0] == source:
        return _weights[up][1]
    factor = scale.float()
    if up.block_size is not None:
        for dim, size in enumerate(up.block_size):
            factor = factor.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    made: torch.Tensor = (weight.detach().float() * factor).to(dtype)
    # what is made while a CUDA graph is captured is the graph's own
    if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        _weights[up] = (source, made)
    return made
