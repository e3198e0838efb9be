"""Attention over full-precision keys and values, by Hugging Face's own functions."""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from turbo_hf.attention.masks import mask_4d
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import Unsupported


def hf_attention(module: torch.nn.Module, options: dict[str, Any], unknown: Collection[str]) -> Callable[..., Any]:
    """Hugging Face's attention function that reads everything that this call brings: SDPA, else the family's eager one.

    Neither raises an error for a keyword that it does not know, which may say which keys a query sees.

    options: `dropout`, `softcap`, `s_aux` and `scaling` of the call. unknown: what else it brings that may matter.

    Raises:
        Unsupported: neither function reads all of it.
    """
    brought = {*unknown, *(name for name in ("softcap", "s_aux") if options[name] is not None)}
    sdpa: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    for function in (sdpa, eager):
        if function is not None and brought <= _read_by(function):
            return function
    unread = sorted(brought - _read_by(sdpa)) or sorted(brought)
    raise Unsupported(
        f"{type(module).__name__} passes {', '.join(unread)} to its attention, which neither the compressed cache nor "
        "Hugging Face's own attention functions read, so that the answer would be wrong. Run it without the patch."
    )


@functools.cache
def _read_by(function: Callable[..., Any]) -> frozenset[str]:
    """The keywords that one of Hugging Face's attention functions reads; a paged cache is none that we could serve."""
    names = set(inspect.signature(function).parameters) - {"cache"}
    # eager functions take attention sinks, `s_aux`, from the module
    code = getattr(function, "__code__", None)
    return frozenset(names | ({"s_aux"} if code is not None and "sinks" in code.co_names else set()))


def full_precision_attention(
    function: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
    causal: bool,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Hugging Face's own attention: without a `TurboCache`, or for a call that it cannot serve.

    function: from `hf_attention`.

    query [B, Hq, M, D]; key, value [B, Hkv, N, D], all tokens; mask: None, [B, N], or [B or 1, 1, M, N]. Returns
    [B, M, Hq, D].
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries < keys and mask is not None and mask.dim() == 2 and _without_padding(mask):
        # for a mask cuDNN makes a plan at each new length, which takes tens of milliseconds
        mask = None
    uses_sdpa = function is ALL_ATTENTION_FUNCTIONS["sdpa"]
    # without a mask SDPA can take its flash kernel, whose own causal flag is correct only for square scores
    flash = uses_sdpa and mask is None and window is None and causal and queries == keys
    if not flash and (mask is None or mask.dim() == 2):
        mask = mask_4d(mask, queries, keys, causal=causal, window=window, device=query.device)
    if uses_sdpa:
        kept = {name: options[name] for name in ("dropout", "scaling")}
        out, _ = function(module, query, key, value, mask, is_causal=flash, **kept, **kwargs)
    else:
        if mask is not None and mask.dtype == torch.bool:
            low = torch.finfo(query.dtype).min
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, low)
        given = {name: option for name, option in options.items() if option is not None}
        out, _ = function(module, query, key, value, mask, **given, **kwargs)
    return torch.as_tensor(out)


_last: tuple[weakref.ref[torch.Tensor], int, bool] | None = None
"""The mask that was read last, its version then, and whether it had no padding: layers of a pass share one."""


def _without_padding(mask: torch.Tensor) -> bool:
    """Whether all columns of a 2D mask hold tokens: one read of the device, as Transformers has for SDPA."""
    global _last  # noqa: PLW0603
    # in inference mode torch does not count changes
    version, last = 0 if mask.is_inference() else mask._version, _last
    if last is not None and last[0]() is mask and last[1] == version and not mask.is_inference():
        return last[2]
    whole = bool(mask.all())
    _last = weakref.ref(mask), version, whole
    return whole


def decompressed(
    cache: TurboCache,
    layer: TurboLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store new keys and values; returns those of all columns, for a call that the compressed cache cannot serve."""
    cache.decompressed = True
    if layer.replay is not None:
        raise Unsupported(
            f"layer {layer.index}: this decode step cannot run on the compressed cache, as earlier passes did, and "
            "in full precision it cannot be a CUDA graph. Choose TurboConfig(cuda_graphs=False)."
        )
    # the first layer checks all layers, before anything has been stored
    by_bucket = next(
        (each for each in cache.turbo_layers() if each.seen and any(each.bucket_index.sorted_blocks)), None
    )
    if by_bucket is not None and mask is not None and mask.dim() != 2:
        raise Unsupported(
            f"layer {by_bucket.index}: cached tokens stand in the order of their buckets, so that no 4D mask can "
            "tell them apart. Pass a 2D mask, or let the layer read every key (SparseConfig.read_all_layers)."
        )
    given_mask = layer.given_mask
    if mask is not None:
        given_mask = mask
        if mask.dim() != 2:
            # new columns that no query sees through a 4D mask are padding
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            new = visible.any(1).any(1)[:, -query.shape[2] :].expand(query.shape[0], -1)
            given_mask = torch.nn.functional.pad(new, (layer.seen, 0), value=True)
    return layer.append_and_dequantize(key, value, given_mask)
