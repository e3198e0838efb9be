"""A balance of key channels, where a key bias makes some of them far larger than others (Qwen2, Qwen2.5).

Keys are divided by a number per channel after rotary embedding, and queries multiplied by it: scores are unchanged, and
small channels keep their bits. The number is the square root of a channel's size: what keys gain by more, INT8 queries
lose.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from turbo_hf.errors import shortened
from turbo_hf.layout import CODE_MAX
from turbo_hf.models.model_layers import module_head_dim
from turbo_hf.sparse.undo_rotary import rotate

PROBES = 64
"""Random inputs by which packed or offloaded weights are measured."""

UNEVEN = 4.0
"""The largest channel of a head over its median from which on a layer with a key bias is balanced. Without a bias it is
1 to 3, seldom 5 (SmolLM2-135M); in 8 of the 24 layers of Qwen2.5-Coder-0.5B it is 4 to 125, and a balance of the others
changed nothing."""

KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
"""Names of norms between a key projection and its rotary embedding: keys are then no sum with a bias."""

LEAST_SHARE = 1e-4
"""Least size of a channel, as a share of its head's largest one: a channel may be empty."""

Above = Mapping[torch.nn.Module, torch.nn.Module]
"""The module that each module of a model lies in (`parents`)."""


class KeyBias(NamedTuple):
    """A layer whose keys have a bias.

    balance: float32 [Hkv, D], mean 1 in each head; None: channels are even, or not known.
    uneven: the largest channel of a head over its median; 0 where it is not known.
    step: where the rotary layout is not known, the INT8 step that the bias alone forces, in standard deviations of a
        typical channel; else 0.
    unknown: why the keys are not known; "" if they are.
    """

    balance: torch.Tensor | None
    uneven: float = 0.0
    step: float = 0.0
    unknown: str = ""


def parents(model: torch.nn.Module) -> Above:
    """The module that each module lies in."""
    return {child: module for module in model.modules() for child in module.children()}


@torch.no_grad()
def key_bias(module: Any, above: Above) -> KeyBias | None:
    """What an attention module's own weights tell of its keys; None: they have no bias, or there are no weights.

    Of a tensor parallel model, the heads are those of this rank.
    """
    projection = getattr(module, "k_proj", None)
    bias: Any = getattr(projection, "bias", None)
    # accelerate's hook loads weights that are stored elsewhere; without it there are none
    there = isinstance(bias, torch.Tensor) and (not bias.is_meta or hasattr(projection, "_hf_hook"))
    if not there or any(getattr(module, name, None) is not None for name in KEY_NORMS):
        return None
    try:
        norm = getattr(above.get(module), "input_layernorm", None)
        both = _squares(projection, bias, norm).unflatten(-1, (-1, module_head_dim(module)))
    except Exception as error:  # a library's layer may raise anything
        return KeyBias(None, unknown=f"a {type(projection).__name__} cannot be run by itself ({shortened(error)})")
    # whatever the default device is
    with torch.device("cpu"):
        shares = rotary_shares(module, above)
    if shares is None:
        typical = both[1].median().clamp(min=torch.finfo(torch.float32).tiny)
        return KeyBias(None, step=float((both[0].amax() / typical).sqrt() / CODE_MAX))
    size = (both.sum(0) @ shares.to(both.device)).sqrt()
    largest = size.amax(-1, keepdim=True)
    balance = size.clamp(min=LEAST_SHARE * largest).sqrt()
    uneven = float((largest[:, 0] / size.median(-1).values).amax())
    return KeyBias((balance / balance.mean(-1, keepdim=True)).float(), uneven)


def _squares(projection: Any, bias: torch.Tensor, norm: Any) -> torch.Tensor:
    """float64 [2, channels]: for inputs as the norm gives them, the square of the part of keys that is always the same,
    and the variance around it. In float64, so that every device finds the same balance."""
    # some layers of packed weights (EETQ) do not say how many inputs they have
    width: Any = getattr(projection, "in_features", None) or len(norm.weight)
    how: Any = {"dtype": bias.dtype, "device": "cpu" if bias.is_meta else bias.device}
    gain = torch.ones(width, **how)
    if norm is not None:
        # of mean 0 and mean square 1, which a norm multiplies by its weight alone
        gain[1::2] = -1
        gain = (norm(gain) - norm(-gain)) / 2
    # a tensor parallel model has a part of it here
    bias, weight = (getattr(x, "to_local", lambda x=x: x)() for x in (bias, getattr(projection, "weight", None)))
    # no classes of a library for packed weights, whatever dtype and shape they name
    plain = type(projection) is torch.nn.Linear and type(weight) in (torch.Tensor, torch.nn.Parameter)
    if plain and not weight.is_meta:
        return torch.stack((bias.double().square(), (weight.double() * gain.double()).square().sum(-1)))
    x = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(0), device="cpu").to(gain) * gain
    without, *each = projection(torch.cat((torch.zeros_like(x[:1]), x))).double()
    return torch.stack((without.square(), (torch.stack(each) - without).square().mean(0)))


def rotary_shares(module: Any, above: Above) -> torch.Tensor | None:
    """float64 [D, D]: the share that the square of channel c before rotary embedding has in that of channel d after it,
    over all angles. None: the module rotates in a way that is not known here."""
    dim: Any = module_head_dim(module)
    how: Any = {"dtype": torch.float64, "device": "cpu"}
    unit = torch.eye(dim, **how)
    if "position_embeddings" not in inspect.signature(module.forward).parameters:
        return None if hasattr(module, "rotary_emb") else unit
    at: Any = module
    turning: int | None = None
    while turning is None and at in above:
        at = above[at]
        turning = next((x.inv_freq.numel() for x in at.children() if hasattr(x, "inv_freq")), None)
    size = getattr(module, "rotary_ndims", dim)
    for channels in () if turning is None else (2 * turning, turning):
        one = torch.ones(1, dim, channels, **how)
        try:
            turned = rotate(module, unit[None, None, :, :size], one, one)[0, 0].square()
        except (AttributeError, TypeError, RuntimeError, IndexError):
            # a family's own way
            continue
        mixed = torch.cat((turned, unit[:, size:]), 1)
        alike = ((mixed == 0) | (mixed == 1)).all() and (mixed.diagonal() == 1).all()
        return mixed / mixed.sum(0) if alike and (mixed.sum(0) <= 2).all() else None
    return None
