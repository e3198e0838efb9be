"""Multi-head latent attention (MLA): its modules hand latents on, instead of keys and values made of them."""

from typing import Any

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
    if not plain or up.bias is not None or weight.element_size() < 2:
        return f"its kv_b_proj is no plain Linear without a bias, but {type(up).__name__}: load it unquantized"
    # a model on the meta device alone has no hook of accelerate
    if hasattr(up, "_hf_hook") and weight.is_meta:
        return "the weights of its kv_b_proj are offloaded: load the model without a device_map that offloads"
    if up._forward_hooks or up._forward_pre_hooks:
        return "its kv_b_proj has hooks, which steps over latents would not call: remove them"
    return None
