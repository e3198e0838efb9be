"""Layers of which each query reads the tokens that an indexer names (DSA): the indexer's mask, prompts, steps.

The model's own code scores all columns by their index keys, and hands the `indices` of the best to attention. It masks
columns by the 4D mask that its attention module is given (`indexer_mask`), and hands that on as well. Prompts are what
Transformers computes: attention under that mask, but for what is not named. Steps read the named latents alone.
"""

from typing import Any, NamedTuple

import torch

from turbo_hf.attention.full_precision import full_precision_attention, hf_attention
from turbo_hf.attention.latent import absorb, up_projections
from turbo_hf.attention.masks import mask_4d
from turbo_hf.cache.index_keys import newest_columns
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns, NewQKV
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import Unsupported
from turbo_hf.layout import Scoring
from turbo_hf.patches.latent import expanded


class Named(NamedTuple):
    """The columns that each query reads.

    indices: int [B, M, K], all different.
    shown: bool [B or 1, 1, M, columns], the mask under which they were chosen; where fewer than K are shown, others
        are named too.
    """

    indices: torch.Tensor
    shown: torch.Tensor

    def mask(self) -> torch.Tensor:
        """bool [B, 1, M, columns]: what is named and shown; for padding, which sees nothing, all."""
        shown, indices = self.shown[:, 0], self.indices.long()
        chosen = torch.zeros(*indices.shape[:2], shown.shape[2], dtype=torch.bool, device=indices.device)
        mask = chosen.scatter_(-1, indices, True) & shown
        return (mask | ~mask.any(-1, keepdim=True))[:, None]


def named_by(indices: torch.Tensor, mask: torch.Tensor | None) -> Named:
    """What a call reads. mask: the 4D mask that the model hands on, bool or added to scores.

    Raises:
        Unsupported: indices without such a mask.
    """
    if mask is None or mask.dim() != 4:
        raise Unsupported(
            "this model names the tokens that it reads (DSA) without the 4D mask under which they were chosen. Call "
            "the model as a whole."
        )
    return Named(indices, mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)


def indexer_mask(
    cache: Any, layer: TurboLayer | None, index: int, mask: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    """The 4D mask for the indexer of layer `index`, bool [B or 1, 1, M, columns], made of the pass's 2D mask or of
    none. One that is 4D already comes back as it is.

    layer: the claimed layer of a TurboCache. x: [B, M, channels], what the attention module is given.
    """
    if mask is not None and mask.dim() != 2:
        return mask
    tokens, columns = x.shape[1], x.shape[1] + (0 if cache is None else cache.get_seq_length(index))
    now = cache.mark.now if isinstance(cache, TurboCache) else None
    replayed = layer is not None and layer.replay is not None
    if layer is not None and layer.replay is not None:
        if layer.index_keys is None and now is not None and now.shown is not None:
            # it shares the columns, and the room for them, of a layer before
            return now.shown[2].to(x.device)
        assert layer.index_keys is not None
        columns = layer.index_keys.kept.shape[1]
    # layers of a pass share one
    like = (tokens, columns, x.device)
    if now is not None and now.shown is not None and now.shown[0] is mask and now.shown[1] == like:
        return now.shown[2]
    if layer is not None and replayed:
        shown = torch.arange(columns, device=x.device) <= newest_columns(layer, tokens)[:, None]
        valid = _valid(layer, columns)
        shown = shown[None, None] if valid is None else shown & valid[:, None, None]
    else:
        made = mask_4d(mask, tokens, columns, causal=True, window=None, device=x.device)
        shown = torch.ones(1, 1, tokens, columns, dtype=torch.bool, device=x.device) if made is None else made
    if now is not None:
        now.shown = mask, like, shown
    return shown


def _valid(layer: TurboLayer, columns: int) -> torch.Tensor | None:
    """bool [B, columns], which columns hold a token, or will; None: all."""
    valid = layer.valid_prefix
    return None if valid is None else torch.nn.functional.pad(valid, (0, columns - valid.shape[1]), value=True)


def attend_named(
    cache: TurboCache,
    layer: TurboLayer,
    module: Any,
    qkv: NewQKV,
    new: NewColumns,
    scoring: Scoring,
    named: Named,
) -> torch.Tensor:
    """Attention [B, H, M, Dv] of new tokens, which join the cache, over the columns that they name."""
    up, (q, k, v) = up_projections(module, qkv.query.dtype), qkv
    if layer.is_decoding(new.tokens):
        layer.append(new.align(k), new.align(v), new, check_later=True)
        out = _step(layer, up, q, named, scoring)
        layer.commit(check_later=True)
        return out
    latent, rotary = k, v
    if layer.seen:
        past = layer.dequantized(layer.seen)
        latent, rotary = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))
    options = {"dropout": 0.0, "softcap": scoring.softcap, "s_aux": scoring.sinks, "scaling": scoring.scaling}
    given = (q, *expanded(module, latent, rotary), named.mask(), None, True)
    function = hf_attention(module, options, ())
    out = full_precision_attention(function, module, *given, options, {}).transpose(1, 2)
    cache.store_prompt(layer, new.align(k), new.align(v), new, None)
    return out


def _step(layer: TurboLayer, up: Any, q: torch.Tensor, named: Named, scoring: Scoring) -> torch.Tensor:
    places, shown = named.indices.long(), named.shown[:, 0]
    seen = shown.expand(len(places), -1, -1).gather(2, places)
    valid = _valid(layer, shown.shape[2])
    if valid is not None:
        # padding takes no place
        tokens = (valid.cumsum(1) - 1).clamp(min=0)
        places = tokens.gather(1, places.flatten(1)).view_as(places)

    def attend(q_latent: torch.Tensor, q_rotary: torch.Tensor) -> torch.Tensor:
        store = layer.kv_store()
        # without a rotary part, zeros are stored
        q_rotary = torch.nn.functional.pad(q_rotary, (0, store.v_open.shape[2] - q_rotary.shape[3]))
        return layer.ops.named_decode(q_latent, q_rotary, store, places, seen, scoring)

    return absorb(up, q, attend)
