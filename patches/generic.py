"""The generic path: which attention modules it takes, why not others, and what a family's file says."""

import inspect
from dataclasses import dataclass

import torch

from turbo_hf.layout import HEAD_DIM_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Args:
        name: as people say it.
        model_types: `config.model_type` of the text models.
        notes: what is special about its attention, in a few words; `doctor` prints it.
    """

    name: str
    model_types: tuple[str, ...]
    notes: str


def is_attention(module: torch.nn.Module) -> bool:
    """Self-attention that gives its keys to a cache and itself to Transformers' AttentionInterface."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names or not hasattr(module, "layer_idx"):
        return False
    parameters = inspect.signature(forward).parameters
    keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return keywords and "past_key_values" in parameters


def obstacle(module: torch.nn.Module) -> str | None:
    """Why the keys and values of this attention module cannot be compressed; None if they can."""
    if getattr(module, "is_cross_attention", False):
        return "cross-attention"
    if hasattr(module, "kv_lora_rank"):
        return "multi-head latent attention (its cache is compressed already)"
    if getattr(module, "is_kv_shared_layer", False) or getattr(module, "store_full_length_kv", False):
        return "shares its keys and values with other layers"
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        return "its class names no head_dim"
    if head_dim % HEAD_DIM_MULTIPLE:
        return f"head dim {head_dim} is no multiple of {HEAD_DIM_MULTIPLE}"
    return None


def lost_to_bias(module: torch.nn.Module) -> float:
    """INT8 step that the key bias alone forces, in standard deviations of a typical key channel; 0 without a bias.

    Keys are W x + b with x of unit mean square after the norm, so a channel's deviation is about the norm of its row
    of W. A bias far above it fills the INT8 range, and what tells keys apart is rounded away.
    """
    projection = getattr(module, "k_proj", None)
    bias = getattr(projection, "bias", None)
    if projection is None or bias is None or bias.is_meta:
        return 0.0
    spread = projection.weight.detach().float().norm(dim=-1).median()
    step = bias.detach().float().abs().amax() / 119
    return float(step / spread.clamp(min=torch.finfo(torch.float32).tiny))
