"""A balance of key channels, where a key bias makes some of them far larger than others (Qwen2).

Post-rotary keys are divided by a number per channel before they are rounded, and queries multiplied by it: scores are
unchanged, and small channels keep their bits. The number is the square root of the channel's size, so that INT8 queries
do not lose what keys gain.
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
"""Largest channel of a head over its median from which on a layer with a key bias is balanced. Heads without a bias
mostly have less than 3."""

NO_LAYOUT = (AttributeError, TypeError, RuntimeError, IndexError)
"""What a rotary embedding of a family's own raises when it is called as others are."""


class KeyBias(NamedTuple):
    """A layer whose keys have a bias.

    balance: float32 [Hkv, D], mean 1 in each head; None: channels are even, or unknown.
    uneven: largest channel of a head over its median; 0 where it is unknown.
    step: where there is no balance for lack of a known rotary layout, the INT8 step that the bias alone forces, in
        standard deviations of a typical channel; else 0.
    unknown: why the keys are not known; "" if they are.
    """

    balance: torch.Tensor | None
    uneven: float = 0.0
    step: float = 0.0
    unknown: str = ""


def parents(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Module]:
    """The module that each module lies in."""
    return {child: module for module in model.modules() for child in module.children()}


@torch.no_grad()
def key_bias(module: Any, above: Mapping[torch.nn.Module, torch.nn.Module]) -> KeyBias | None:
    """What an attention module's own weights tell of its keys; None: they have no bias, or there are no weights.

    above: `parents` of the model. Of a tensor parallel model, the heads are those of this rank.
    """
    projection = getattr(module, "k_proj", None)
    bias = getattr(projection, "bias", None)
    # accelerate's hook loads weights that are stored elsewhere; without it there are none
    if not isinstance(bias, torch.Tensor) or (bias.is_meta and not hasattr(projection, "_hf_hook")):
        return None
    try:
        fixed, spread = _squares(projection, bias, getattr(above.get(module), "input_layernorm", None))
    except Exception as error:  # a library's layer may raise anything
        return KeyBias(None, unknown=f"a {type(projection).__name__} cannot be run by itself: {shortened(error)}")
    fixed, spread = (x.unflatten(0, (-1, module_head_dim(module))) for x in (fixed, spread))
    shares = rotary_shares(module, above)
    if shares is None:
        typical = spread.median().clamp(min=torch.finfo(torch.float32).tiny)
        return KeyBias(None, step=float((fixed.amax() / typical).sqrt() / CODE_MAX))
    size = ((fixed + spread) @ shares.to(fixed)).sqrt()
    uneven = float((size.amax(-1) / size.median(-1).values).amax())
    balance = size.clamp(min=1e-4 * size.amax(-1, keepdim=True)).sqrt()
    return KeyBias((balance / balance.mean(-1, keepdim=True)).float(), uneven)


def _squares(projection: Any, bias: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [channels] each: the square of what keys have of the bias, and their variance around it, for normalized
    inputs. In float64, so that every device gives the same balance."""
    device, weight = "cpu" if bias.is_meta else bias.device, getattr(projection, "weight", None)
    # some layers of packed weights (EETQ) do not say how many inputs they have
    width: Any = getattr(projection, "in_features", None) or len(norm.weight)
    how: Any = {"dtype": bias.dtype, "device": device}
    gain = torch.ones(width, **how)
    if norm is not None:
        # of mean 0 and mean square 1, which a norm scales by its weight alone
        gain[1::2] = -1
        gain = (norm(gain) - norm(-gain)) / 2
    plain = isinstance(weight, torch.Tensor) and weight.is_floating_point() and not weight.is_meta
    if plain and weight.shape == (len(bias), width) and weight.itemsize > 1:
        return bias.double().square(), (weight.double() * gain.double()).square().sum(-1)
    x = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(0), device="cpu").to(**how) * gain
    without, *each = projection(torch.cat((torch.zeros_like(x[:1]), x))).double()
    return without.square(), (torch.stack(each) - without).square().mean(0)


def rotary_shares(module: Any, above: Mapping[torch.nn.Module, torch.nn.Module]) -> torch.Tensor | None:
    """float64 [D, D]: the share of the square of channel c before rotary embedding in that of channel d after it, over
    all angles. None: the module rotates in a way that is not known here."""
    dim: Any = module_head_dim(module)
    unit = torch.eye(dim, dtype=torch.float64, device="cpu")
    if "position_embeddings" not in inspect.signature(module.forward).parameters:
        return None if hasattr(module, "rotary_emb") else unit
    at, turning = module, None
    while turning is None and at in above:
        at = above[at]
        turning = next(
            (x.inv_freq for x in at.children() if isinstance(getattr(x, "inv_freq", None), torch.Tensor)), None
        )
    if turning is None:
        return None
    size = getattr(module, "rotary_ndims", dim)
    for channels in (2 * len(turning), len(turning)):
        one = torch.ones(1, dim, channels, dtype=torch.float64, device="cpu")
        try:
            turned = rotate(module, unit[None, None, :, :size], one, one)[0, 0].square()
        except NO_LAYOUT:
            continue
        mixed = torch.nn.functional.pad(turned, (0, dim - size)) + torch.diag((torch.arange(dim) >= size).double())
        # each channel alone, or two that rotate together
        pairs = bool(
            ((mixed == 0) | (mixed == 1)).all() and (mixed.sum(0) <= 2).all() and (mixed.diagonal() == 1).all()
        )
        return mixed / mixed.sum(0) if pairs else None
    return None
