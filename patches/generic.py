"""The generic path: which attention modules it takes, and why it refuses others."""

import inspect
from typing import Any

import torch

from turbo_hf.layout import HEAD_DIM_MULTIPLE
from turbo_hf.models.model_layers import CACHE_KEYWORDS, LATENT_TYPES, module_head_dim
from turbo_hf.models.sources import hands_indices
from turbo_hf.patches.latent import why_not_absorbed

REFUSED = {
    "diffllama": "its attention changes values after the cache has seen them",
    "doge": "its attention joins the mask with weights of its own",
    "dory": "it runs its layers several times per token, each time with another layer of the cache",
    "hrm_text": "it runs its layers several times per token, each time with another layer of the cache",
    "jetmoe": "its attention repeats keys and values after the cache has seen them",
    "minimax": "it takes no cache but its own",
    "mllama_text_model": "its cross-attention layers keep the keys of images, which are no tokens, in the same cache",
    "moshi": "its attention sees further than the window of its cache",
    "zamba": "one attention module serves several of its layers",
    "zamba2": "one attention module serves several of its layers",
}
"""Model types whose classes look supported but are not."""

NO_INDICES = "its indexer (DSA) masks tokens instead of naming them"


def chooses_attention(kind: type) -> bool:
    """Whether a class takes its attention from Transformers' AttentionInterface."""
    code = getattr(inspect.unwrap(getattr(kind, "forward", None) or kind), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def is_attention(kind: type) -> bool:
    """Whether a class stores keys and values in a cache and uses Transformers' AttentionInterface."""
    if not chooses_attention(kind):
        return False
    forward: Any = getattr(kind, "forward", None)
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return keywords and any(name in parameters for name in CACHE_KEYWORDS)


def why_not_compressible(module: torch.nn.Module) -> str | None:
    """Why the keys and values of this attention module cannot be compressed; None if they can."""
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        return "cross-attention"
    if is_latent(module):
        return _why_no_latents(module)
    if getattr(module, "is_causal", True) is False:
        return "its attention is not causal, as in encoders"
    head_dim = module_head_dim(module)
    if head_dim is None:
        return "its class does not say how many channels a head has"
    if head_dim % HEAD_DIM_MULTIPLE:
        return f"head dim {head_dim} is no multiple of {HEAD_DIM_MULTIPLE}"
    value_dim = getattr(module, "v_head_dim", head_dim)
    if value_dim != head_dim:
        return f"its keys have {head_dim} channels per head and its values {value_dim}"
    return None


def is_latent(module: torch.nn.Module) -> bool:
    """Whether it is multi-head latent attention (MLA)."""
    return hasattr(module, "kv_lora_rank")


def _why_no_latents(module: Any) -> str | None:
    """Why the latents of this attention module cannot be compressed; None if they can."""
    if getattr(module, "indexer", None) is not None and not hands_indices(type(module)):
        return NO_INDICES
    if module.config.model_type not in LATENT_TYPES:
        return f"latent attention of {module.config.model_type} is not known here"
    reason = why_not_absorbed(module)
    if reason is not None:
        return reason
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        if getattr(module, name) % HEAD_DIM_MULTIPLE:
            return f"{name} {getattr(module, name)} is no multiple of {HEAD_DIM_MULTIPLE}"
    if not module.qk_rope_head_dim and not hands_indices(type(module)):
        return "its latents have no rotary part"
    return None


def shares_keys(module: torch.nn.Module) -> str | None:
    """How it shares keys with other layers, which must then remain in full precision; None if it does not."""
    if getattr(module.config, "num_kv_shared_layers", None) == 0:
        # transformers 5.17 marks layers of Gemma 4 whose keys nobody reads
        return None
    if getattr(module, "is_kv_shared_layer", False):
        return "it reads the keys and values of an earlier layer, and keeps none"
    return "later layers read its keys and values" if getattr(module, "store_full_length_kv", False) else None
