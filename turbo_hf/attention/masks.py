"""The mask function that Transformers calls once per pass for each kind of layer, and 4D masks for other attention."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import causal_mask_function, sdpa_mask

from turbo_hf.cache.pass_mark import untraced
from turbo_hf.errors import Unsupported

PART = 1 << 26
"""Elements of a 4D mask (all rows of the batch) that are compared at a time."""

SLIDING_OVERLAY = "sliding_window_overlay.<locals>.inner_mask"
CHUNKED_OVERLAY = "chunked_overlay.<locals>.inner_mask"
BLOCK_OVERLAY = "blockwise_overlay.<locals>.inner_mask"
AND, OR = "and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"

_of_thread = threading.local()
"""`made`: the config whose masks this thread made last, and the windows of these masks."""

_packed: ContextVar[bool] = ContextVar("turbo_hf_packed", default=False)


@contextmanager
def packed_pass() -> Iterator[None]:
    """Inside of it no mask is made in this thread: the cache keeps requests apart."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def forget_windows() -> None:
    """A new pass makes its own masks."""
    _of_thread.made = None


def require_window(layer: int, window: int | None, config: PreTrainedConfig) -> None:
    """Unsupported if this pass has made masks for this config, none of them with this layer's window (None: causal)."""
    windows = _windows(config)
    if windows and window not in windows:
        made = "; ".join("without a window" if each is None else f"window {each}" for each in windows)
        raise Unsupported(
            f"layer {layer} has the window {window} by the config, and this model masks otherwise ({made}): the answer "
            "would be wrong. Correct sliding_window and layer_types in its config, or run it without the patch."
        )


def _windows(config: PreTrainedConfig) -> set[int | None]:
    made = getattr(_of_thread, "made", None)
    return made[1] if made is not None and made[0]() is config else set()


def turbo_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The model's 2D mask, unchanged, for causal and sliding-window attention; a 4D bool mask for any other.

    Arguments as Transformers gives them to its own mask functions. Returns None (no padding), bool [B, columns], or
    bool [B, 1, q_length, kv_length]. A 2D mask of a long prompt is thousands of times smaller than the 4D one, and
    tells the cache where padding is.
    """
    # passes that torch.compile traces are not packed
    if not torch.compiler.is_compiling() and _packed.get():
        return None
    return _mask(*args, **kwargs)


@untraced
def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length

    def make(first: int, rows: int) -> torch.Tensor | None:
        # sdpa_mask is annotated for an int offset and takes the tensor of a static cache too
        offset: Any = q_offset + first
        return sdpa_mask(
            batch_size=batch_size,
            q_length=rows,
            kv_length=kv_length,
            q_offset=offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**kwargs, "allow_is_causal_skip": False},
        )

    parts = _parts(mask_function)
    # chunks have no window that a layer knows
    windows = {_only_cell(part) for part in parts if _name(part) == SLIDING_OVERLAY} or {None}
    config = kwargs.get("config")
    if config is not None:
        _of_thread.made = weakref.ref(config), _windows(config) | windows
    if at_end:
        names = {_name(part) for part in parts}
        blocks = BLOCK_OVERLAY in names and CHUNKED_OVERLAY not in names and len(windows) == 1
        sizes = (attention_mask, batch_size, q_length, kv_length)
        if _is_causal(mask_function) or (blocks and _amounts_to_causal(make, *sizes, windows.pop())):
            return attention_mask
    return make(0, q_length)


def _parts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions that a mask function joins by "and" and "or", at any depth; itself if it joins none."""
    if _name(mask_function) not in (AND, OR):
        return [mask_function]
    return [part for joined in _only_cell(mask_function) for part in _parts(joined)]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", "")


def _only_cell(function: Callable[..., Any]) -> Any:
    """The only value that a function closes over; None if there are none or several."""
    cells: Any = getattr(function, "__closure__", None) or ()
    return cells[0].cell_contents if len(cells) == 1 else None


def _amounts_to_causal(
    make: Callable[[int, int], torch.Tensor | None],
    attention_mask: torch.Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    window: int | None,
) -> bool:
    """Whether a mask with blocks of images is causal (and sliding) nevertheless, because there are no images.

    make(first, rows): these rows of the mask, bool [batch, 1, rows, keys].
    """
    step = max(1, PART // (batch * keys))
    for first in range(0, queries, step):
        rows = min(step, queries - first)
        mask, end = make(first, rows), keys - queries + first + rows
        if mask is None:
            return False
        shown = None if attention_mask is None else attention_mask[:, -keys:][:, :end]
        plain = mask_4d(shown, rows, end, causal=True, window=window, device=mask.device)
        seen, later = mask[..., :end], mask[..., end:]
        same = seen.all() if plain is None else torch.equal(seen, plain.expand_as(seen))
        if not same or (end < keys and later.any()):
            return False
    return True


def _is_causal(mask_function: Callable[..., Any]) -> bool:
    """Causal, or causal and sliding window. A chunked mask has the same outer shape, so its parts are looked at."""
    if mask_function is causal_mask_function:
        return True
    joined = _only_cell(mask_function)
    if _name(mask_function) != AND or not isinstance(joined, tuple) or len(joined) != 2:
        return False
    overlay, causal = joined
    return causal is causal_mask_function and _name(overlay) == SLIDING_OVERLAY


def mask_4d(
    mask: torch.Tensor | None,
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    """bool [B or 1, 1, queries, keys] for queries that are the last of the keys; None where all keys are visible."""
    if mask is None and window is None and (not causal or queries == 1):
        return None
    q = torch.arange(keys - queries, keys, device=device)[:, None]
    k = torch.arange(keys, device=device)[None]
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed &= k <= q
    if window is not None:
        allowed &= k > q - window
    allowed = allowed[None, None]
    return allowed if mask is None else allowed & mask[:, None, None, -keys:].bool().to(device)
