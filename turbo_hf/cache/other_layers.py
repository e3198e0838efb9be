"""Transformers' own layers in a TurboCache: the end of their recording, and what they can still bring back."""

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


def stop_recording(layer: Any) -> None:
    """One of Transformers' own layers as `activate_past_recording` found it, without what it kept for a `crop`."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and layer.record_past:
        for index, state in layer.conv_states.items():
            size: Any = layer.conv_kernel_size[index]
            if state is not None:
                # cut, or padded at the front, to the size of the kernel: as after a prompt
                layer.conv_states[index] = torch.nn.functional.pad(state, (size - state.shape[-1], 0))
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.record_past and layer.is_initialized:
        # drops what has left its window
        layer.crop(0)
    if isinstance(layer, LinearAttentionCacheLayerMixin | DynamicSlidingWindowLayer):
        layer.record_past = False


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
        filled = seen >= layer.sliding_window
        recording = not filled or (
            recording and held + tokens_to_remove >= min(seen + tokens_to_remove, layer.sliding_window - 1)
        )
    if not recording:
        raise ValueError(
            f"layer {index}: a {type(layer).__name__} can be cropped only by what it has recorded. Call "
            "activate_past_recording() before the pass to be rolled back."
        )
