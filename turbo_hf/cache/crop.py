"""Which of a layer's newest tokens can be removed."""

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from turbo_hf.cache.layer import TurboLayer


def removable(layer: "TurboLayer", tokens_to_remove: int) -> list[int]:
    """How many tokens of each row `layer.crop(tokens_to_remove)` would remove; [] for a layer without tokens.

    Raises:
        ValueError: a positive number, more columns than there are, or tokens that stay or go together with others:
            those behind what a sliding window has dropped, and those in the order of their buckets.
    """
    if tokens_to_remove > 0:
        raise ValueError(f"crop takes the number of tokens to remove as a negative number; got {tokens_to_remove}.")
    if not (layer.is_initialized and tokens_to_remove):
        return []
    call = f"layer {layer.index}: crop({tokens_to_remove})"
    if -tokens_to_remove > layer.seen:
        raise ValueError(
            f"crop({tokens_to_remove}): the cache holds only {layer.seen} columns. Remove at most so many, or reset()."
        )
    counts = [-tokens_to_remove] * layer.rows
    if layer.valid is not None:
        counts = layer.valid[:, layer.seen + tokens_to_remove :].sum(-1).tolist()
    for row, (count, held) in enumerate(zip(counts, layer.lengths(), strict=True)):
        if held - count < min(held + layer.dropped[row] - count, (layer.window or 1) - 1):
            raise ValueError(
                f"{call} needs tokens that have left the sliding window of {layer.window}. Call "
                "activate_past_recording() before the pass to be rolled back."
            )
        layer.bucket_index.require(row, held - count, call)
    return counts


def require_recorded(layer: Any, index: int, tokens_to_remove: int, seen: int) -> None:
    """ValueError if one of Transformers' own layers no longer holds what `crop(tokens_to_remove)` would bring back.

    seen: columns of the whole cache.
    """
    recording = getattr(layer, "record_past", True)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if tokens_to_remove and any(layer.is_recurrent_states_initialized.values()):
            raise ValueError(
                f"layer {index}: a {type(layer).__name__} has mixed all tokens into its recurrent state, and none can "
                "be removed again. Keep a copy.deepcopy of the cache to return to."
            )
        for number, state in layer.conv_states.items():
            kernel: Any = layer.conv_kernel_size[number]
            # a state is shorter than its kernel where it holds all that there was
            if state is not None and state.shape[-1] + tokens_to_remove < min(kernel, seen + tokens_to_remove):
                recording = False
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        keys: Any = layer.keys
        held, seen = keys.shape[-2], int(layer.get_seq_length())
        full = seen >= layer.sliding_window
        recording = not full or (
            recording and held + tokens_to_remove >= min(seen + tokens_to_remove, layer.sliding_window - 1)
        )
    if not recording:
        raise ValueError(
            f"layer {index}: a {type(layer).__name__} can be cropped only by what it has recorded. Call "
            "activate_past_recording() before the pass to be rolled back."
        )
