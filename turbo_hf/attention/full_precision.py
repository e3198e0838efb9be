"""Attention over full-precision keys and values, by Hugging Face's own functions."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from turbo_hf.attention.masks import mask_4d
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
