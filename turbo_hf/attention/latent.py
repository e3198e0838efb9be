"""Multi-head latent attention (MLA): queries and outputs meet the cached latents, not keys and values made of them.

Transformers caches a latent and a rotary part per token, and `expand_kv` of the attention module makes keys and values
of all of them in each pass. On a patched model it hands both on as they are (`patches.latent.keep_latent`). Decode
steps then attend to the latents (`absorbed_attention`); prompts expand their own tokens, and those of the past, as
without a patch (`expanded_attention`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from turbo_hf.cache.rows import NewQKV
from turbo_hf.errors import Unsupported
from turbo_hf.layout import KVStore, Scoring
from turbo_hf.ops.latent.contract import LatentOps
from turbo_hf.ops.store.quantize import dequantize
from turbo_hf.patches.latent import expanded, up_weight, why_not_absorbed


class UpProjections(NamedTuple):
    """Views of the weights that make keys [H, nope, rank] and values [H, Dv, rank] of a latent."""

    keys: torch.Tensor
    values: torch.Tensor


def up_projections(module: Any, dtype: torch.dtype) -> UpProjections:
    """The up-projections of an attention module, as its weights are now; those in FP8 in `dtype`.

    Raises:
        Unsupported: they have been replaced, since the patch, by what cannot be absorbed.
    """
    reason = why_not_absorbed(module)
    if reason is not None:
        raise Unsupported(f"{type(module).__name__}: {reason}.")
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    weight = up_weight(module.kv_b_proj, dtype).unflatten(0, (-1, nope + value))
    return UpProjections(weight[:, :nope], weight[:, nope:])


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, H, M, n] times weight [H, n, m] of each head: [B, H, M, m] in x's dtype."""
    batch, heads, tokens, _ = x.shape
    # [H, B x M, n]: the weights are read once, not for each row
    together = x.transpose(0, 1).reshape(heads, batch * tokens, -1)
    # autocast computes float32 in its own type
    product: torch.Tensor = (together @ weight.to(x.dtype)).to(x.dtype).unflatten(1, (batch, tokens))
    return product.transpose(0, 1)


def absorbed_attention(
    ops: LatentOps,
    up: UpProjections,
    q: torch.Tensor,
    store: KVStore,
    starts: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention [B, H, M, Dv] of the newest tokens over the latents of a store, which holds theirs already.

    q: [B, H, M, nope + R]. starts: as in `LatentOps.latent_decode`.
    """
    return absorb(up, q, lambda x, rotary: ops.latent_decode(x, rotary, store, scoring.scaling, starts=starts).out)


def absorb(
    up: UpProjections, q: torch.Tensor, attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Attention [B, H, M, Dv] of queries [B, H, M, nope + R] by `attend`, over latents.

    attend: takes the queries multiplied by the up-projection of keys [B, H, M, rank], and their rotary part; returns
    weighted means of latents [B, H, M, rank].
    """
    nope = up.keys.shape[1]
    out = attend(_by_head(q[..., :nope], up.keys), q[..., nope:])
    return _by_head(out, up.values.mT)


def expanded_attention(
    module: Any,
    qkv: NewQKV,
    past: KVStore | None,
    starts: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention [B, H, M, Dv] of new tokens, whose keys and values are expanded, over themselves and the latents of a
    past. starts: int64 [B], the first column that holds a token; None: all do."""
    (q, keys, values), tokens = qkv, qkv.query.shape[2]
    mask: Any = None
    if starts is not None or past is not None:
        column = torch.arange(tokens, device=q.device)
        mask = (column <= column[:, None]).expand(len(q), 1, tokens, tokens)
        if starts is not None:
            # padding sees itself rather than nothing
            mask = mask & ((column >= starts[:, None, None]) | (column == column[:, None]))[:, None]
    if past is not None:
        earlier = expanded(module, *dequantize(past, q.dtype))
        keys, values = (torch.cat(pair, 2) for pair in zip(earlier, (keys, values), strict=True))
        place = torch.arange(earlier[0].shape[2], device=q.device)
        held = place < (past.sealed * past.block + past.open_len)[:, None]
        mask = torch.cat((held[:, None, None].expand(-1, 1, tokens, -1), mask), -1)
    out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, scale=scoring.scaling
    )
    return out


def require_plain(index: int, scoring: Scoring) -> None:
    """Unsupported for scores of a layer that latent attention does not know."""
    if scoring.softcap is not None or scoring.sinks is not None:
        raise Unsupported(f"layer {index}: latent attention with softcap or sinks is not known here.")
