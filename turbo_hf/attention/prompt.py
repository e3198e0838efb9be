"""A prompt's attention: over the new tokens, and over what the cache holds already."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from turbo_hf.attention.latent import expanded_attention, up_projections
from turbo_hf.attention.sparse_step import Source, new_buckets
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns, NewQKV
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import KVStore, Rounding, Scoring, narrowed
from turbo_hf.ops.maths import balanced_keys, balanced_queries
from turbo_hf.ops.prefill.contract import PrefillOps
from turbo_hf.ops.tuning import in_tiles, prefill_mode
from turbo_hf.patches.latent import expanded

PLAN_PAYS = 1 << 27
"""Rows times tokens squared from which cuDNN should pay off although it makes a plan for each new shape.

An estimate: on an H200 a plan took about 37 ms, and FlashAttention-2, scaled down from 1 x 131k, should be slower than
cuDNN by about as much in 32 layers of 32 heads of this size.
"""


def attend_prompt(
    cache: TurboCache, layer: TurboLayer, source: Source, qkv: NewQKV, new: NewColumns, scoring: Scoring
) -> torch.Tensor:
    """Attention over the new tokens, not yet rounded to the cache's widths, and over the cache; then they join it."""
    q, k, v = (new.align(x) for x in qkv)
    starts, buckets = new.starts_on(q.device), None
    past = layer.kv_store() if layer.seen else None
    if layer.latent:
        # made here, FP8 weights of steps are none of a CUDA graph's
        up_projections(source.module, q.dtype)
        # what padding holds is arbitrary, and 0 times NaN is NaN
        own = NewQKV(q, *expanded(source.module, new.blank(k), new.blank(v)))
        out = expanded_attention(source.module, own, past, starts, scoring)
    else:
        buckets = new_buckets(layer, source, qkv.key, new)
        # the model may have been moved since the patch
        balance = None if layer.balance is None else layer.balance.to(q.device)
        held = None if past is None else layer.lengths()
        given = (NewQKV(q, k, v), past, starts, layer.window, scoring)
        out = prompt_attention(layer.config, layer.ops, *given, held=held, balance=balance)
    cache.store_prompt(layer, k, v, new, buckets)
    return out


def prompt_attention(
    config: TurboConfig,
    ops: PrefillOps,
    qkv: NewQKV,
    past: KVStore | None,
    starts: torch.Tensor | None,
    window: int | None,
    scoring: Scoring,
    *,
    held: Sequence[int] | None = None,
    balance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, Hq, M, D] of new tokens, aligned, over themselves and a past; nothing is stored.

    held: tokens of each row that the past holds. balance: of the past's keys (`layout`).
    """
    q, k, v = qkv
    known = 0
    if past is not None and window is None and scoring.is_plain and in_tiles(past):
        known = past.table.shape[1] * past.block if held is None else max(held)
    mode = prefill_mode(config.prompt_attention, q, known)
    if balance is not None and (past is not None or mode != "native"):
        # like the stored ones, and as well rounded
        q, k = balanced_queries(q, balance), narrowed(balanced_keys(k, balance), k.dtype)
    if mode == "native" and config.expert.backend == "auto" and past is None and _is_plain(q, starts, window, scoring):
        return _sdpa(q, k, v, scoring.scaling)
    return ops.prefill(q, k, v, scoring, Rounding(mode), past=past, starts=starts, window=window).out


def packed_attention(
    config: TurboConfig,
    qkv: NewQKV,
    edges: torch.Tensor,
    longest: int,
    window: int | None,
    scoring: Scoring,
) -> torch.Tensor | None:
    """Attention [1, Hq, T, D] of first prompts that lie one after the other, each over its own tokens.

    edges: int32 [prompts + 1], where each begins, and the end. longest: the most tokens of one. None: one launch does
    not compute that, as the prompts are not plain causal attention in the model's precision. Values may have fewer
    channels than keys (latent attention, expanded): the output then has as many.
    """
    mode = prefill_mode(config.prompt_attention, qkv.query[:, :, :longest])
    plain = mode == "native" and config.expert.backend == "auto"
    if not plain or not _is_plain(qkv.query[:, :, :longest], None, window, scoring):
        return None
    channels, missing = qkv.value.shape[3], qkv.key.shape[3] - qkv.value.shape[3]
    if missing > 0 and qkv.value.is_cuda:
        # the kernel has one head dim
        qkv = qkv._replace(value=torch.nn.functional.pad(qkv.value, (0, missing)))
    if not _flash_serves(*qkv, qkv.query.shape[1] != qkv.key.shape[1]):
        return None
    q, k, v = (x[0].transpose(0, 1) for x in qkv)
    flash: Any = torch.ops.aten._flash_attention_forward.default
    out: torch.Tensor = flash(q, k, v, edges, edges, longest, longest, 0.0, True, False, scale=scoring.scaling)[0]
    return out.transpose(0, 1)[None, ..., :channels]


def _is_plain(q: torch.Tensor, starts: torch.Tensor | None, window: int | None, scoring: Scoring) -> bool:
    """Whether a first prompt is plain causal attention, for which torch has kernels."""
    short = window is None or q.shape[2] <= window
    return short and starts is None and scoring.is_plain


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention in the model's precision: by cuDNN where that pays off, else by the first kernel that can."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and (q.dtype == torch.float32 or q.shape[-1] > 256):
        # no fused kernel supports grouped heads here, and the plain one holds all M x M scores
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    pays = q.shape[0] * q.shape[2] ** 2 >= PLAN_PAYS
    if not pays and _flash_serves(q, k, v, grouped):
        # the kernel that would be chosen below; to choose it anew takes longer than to launch it
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
        out: torch.Tensor = flash(q, k, v, 0.0, True, scale=scaling)[0]
        return out
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.backends.cuda.cudnn_sdp_enabled():
        order.insert(0 if pays else 1, SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(order, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )


_flash: dict[Any, bool] = {}
"""Whether FlashAttention serves a first prompt, by what that depends on besides its rows and length."""


def _flash_serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> bool:
    # called by itself, the kernel does not pad channels
    whole = all(x.shape[3] % 8 == 0 for x in (q, k, v))
    if not (q.is_cuda and q.numel() and whole and torch.backends.cuda.flash_sdp_enabled()):
        return False
    key = (q.dtype, q.device, *((x.shape[1], x.shape[3], x.stride(3)) for x in (q, k, v)))
    if key not in _flash:
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped)
        _flash[key] = torch.backends.cuda.can_use_flash_attention(params)
    return _flash[key]
