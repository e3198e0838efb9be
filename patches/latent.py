"""Multi-head latent attention (MLA): its modules hand latents on, instead of keys and values made of them."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from turbo_hf.errors import Unsupported, shortened

EXPAND = "expand_kv"
"""The method of attention modules that makes keys and values of latents."""

PROBES = 64
"""Random inputs used to measure queries."""

ROUNDED_4 = 0.09
"""Error of a 4-bit code in standard deviations of its channel: a step is a 15th of the range of 64 values (4.7)."""


def keep_latent(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `expand_kv` on a patched model: latent [B, 1, N, rank] and rotary part [B, 1, N, R] as they are.

    With another attention than the patch's: keys and values, as the class makes them.
    """
    # the name under which the patch registers its attention (`turbo_attention.NAME`)
    if module.config._attn_implementation != "turbo_hf":
        latent, rotary = getattr(type(module), EXPAND)(module, latent, rotary)
    return latent, rotary


def keeps_latent(module: Any) -> bool:
    """Whether this attention module hands latents to its attention function (`keep_latent`)."""
    return EXPAND in vars(module)


def expanded(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, H, N, nope + R] and values [B, H, N, Dv] of latents, by the module's own class; dtype: theirs."""
    up = module.kv_b_proj
    # autocast, under which latents are narrower than weights, is off here
    given = latent if is_fp8(up) else latent.to(up.weight.dtype)
    keys, values = getattr(type(module), EXPAND)(module, given, rotary[..., : module.qk_rope_head_dim])
    return keys.to(latent.dtype), values.to(latent.dtype)


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


@torch.no_grad()
def score_error(module: Any) -> float:
    """Root mean squared error of a score, in natural log units, with latents at 4 bit, of the head with the largest.

    Queries are measured by running their projections on random inputs of unit mean square, as a norm gives them, and
    latents are taken as of unit mean square times the weight of their norm. 0 where weights are not at hand.

    Raises:
        Unsupported: weights of a kind that does not run on such inputs.
    """
    norm, narrow, nope = module.kv_a_layernorm.weight, getattr(module, "q_b_proj", None), module.qk_nope_head_dim
    # A.X K2 makes queries and gates in one
    gated = getattr(module, "q_gate_proj", None)
    whole = gated or narrow or module.q_proj
    if norm.is_meta or module.kv_b_proj.weight.is_meta:
        return 0.0
    width: Any = module.config.hidden_size if gated else getattr(whole, "in_features", None)
    width = width or module.config.hidden_size
    try:
        x = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(0), device="cpu")
        x = x.to(norm.device, norm.dtype)
        if gated is not None:
            x = module.q_a_proj(x)
            x = torch.cat((module.q_a_layernorm(x), x), -1)
        queries = whole(x if narrow is None else x * module.q_a_layernorm.weight).float()
        q = queries.unflatten(-1, (module.num_heads, -1))[..., :nope]
        keys = up_weight(module.kv_b_proj, norm.dtype).float().unflatten(0, (-1, nope + module.v_head_dim))[:, :nope]
        absorbed = torch.einsum("nhd,hdc->hnc", q, keys)
    except Exception as error:  # a library's layer may raise anything
        raise Unsupported(
            f"a query projection of this model is a {type(whole).__name__}, which cannot be run by itself "
            f"({shortened(error)}), so that it is not known which layers 4-bit latents disturb. Name those that are to "
            "be kept at 8 bit, or none (TurboConfig(int8_layers=())), and evaluate."
        ) from error
    spread = norm.float().square().mean().sqrt()
    scale = module.scaling * ROUNDED_4
    for name in ("mla_scale_q_lora", "mla_scale_kv_lora", "q_lora_scale", "kv_lora_scale"):
        scale *= getattr(module, name, None) or 1.0
    return float(absorbed.square().sum(-1).mean(-1).amax().sqrt() * spread * scale)


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
