"""Transformers' own layers in a TurboCache: marked updates, the end of their recording, what they can bring back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.pass_mark import PassMark, ordinary
from turbo_hf.errors import Unsupported

R = TypeVar("R")


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


class MarkedUpdates(Cache):
    """The part of a `TurboCache` that updates Transformers' own layers."""

    mark: PassMark

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `Cache`.

        Raises:
            ValueError: the cache is broken, or another thread uses it; or it has no such layer.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(f"layer_idx {layer_idx}: the cache has layers 0 to {len(self.layers) - 1}.")
        update = super().update
        if isinstance(self.layers[layer_idx], TurboLayer):
            # a TurboLayer sets its own marks when it stores, which may be later
            return update(key_states, value_states, layer_idx, *args, **kwargs)
        cache: Any = self
        rows = cache.rows()
        if rows is not None and len(key_states) != rows:
            raise ValueError(
                f"layer {layer_idx}: the cache holds {rows} rows; this pass brings {len(key_states)}. Use a new "
                "TurboCache, or reset() this one."
            )
        layer: Any = self.layers[layer_idx]
        for held, new in ((getattr(layer, "keys", None), key_states), (getattr(layer, "values", None), value_states)):
            # an empty layer may hold tensors without heads
            if held is not None and held.dim() == 4 and held.shape[1::2] != new.shape[1::2]:
                raise ValueError(
                    f"layer {layer_idx}: the cache holds {list(held.shape)}, and this pass brings {list(new.shape)}. "
                    "Use a new TurboCache, or reset() this one."
                )
        with_layer = functools.partial(update, key_states, value_states, layer_idx, *args, **kwargs)
        return self._marked(with_layer, layer_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As in `Cache`; refused as `update` is, and where nothing tells the end of the pass."""
        if conv_states.is_inference() and getattr(self.layers[layer_idx], "record_past", False):
            # while recording, the state is kept instead of copied: it must be an ordinary tensor of its own
            conv_states = ordinary(conv_states.clone)()
        update = functools.partial(super().update_conv_state, conv_states, layer_idx, state_idx, **kwargs)
        return self._marked(update, layer_idx, f"conv_states {state_idx}")

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As in `Cache`; refused as `update_conv_state` is."""
        update = functools.partial(super().update_recurrent_state, recurrent_states, layer_idx, state_idx, **kwargs)
        return self._marked(update, layer_idx, f"recurrent_states {state_idx}")

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As in `Cache`; of Transformers' own layers refused as `update_conv_state` is."""
        update = functools.partial(super().update_indexer, indexer_key_states, layer_idx)
        # a TurboLayer overwrites nothing that it held before the pass
        return (
            update() if isinstance(self.layers[layer_idx], TurboLayer) else self._marked(update, layer_idx, "indexer")
        )

    def _marked(self, update: Callable[[], R], layer: int, kind: str = "") -> R:
        """The result of an update of one of Transformers' own layers."""
        self._turn(layer, kind)
        self.mark.writing = f"layer {layer}"
        # states are written in place, also outside `torch.inference_mode` later
        result = ordinary(update)() if kind and torch.is_inference_mode_enabled() else update()
        self.mark.writing = None
        self.mark.settle()
        return result

    def _turn(self, layer: int, kind: str) -> None:
        """`PassMark.turn` for a kind of state; "": keys and values.

        Raises:
            Unsupported: another kind outside of a patched model's pass, and nothing would tell that it has ended.
        """
        now, cache = self.mark.now, cast(Any, self)
        if kind and (now is None or now.depth is None) and (cache.model is not None or not self._ends_in_keys()):
            raise Unsupported(
                f"layer {layer}: the states of a {type(self.layers[layer]).__name__} change in place, so that a "
                "TurboCache must be told of the whole pass: patch the model, and call the model itself. To read them, "
                f"take cache.layers[{layer}]."
            )
        self.mark.turn((layer, kind) if kind else layer)

    def _ends_in_keys(self) -> bool:
        """Whether the last layer stores keys and values alone: a pass has ended when it has."""
        # not the dummy layers, which transformers 5.17 does not have
        kinds = (CacheLayerMixin, LinearAttentionCacheLayerMixin)
        last = next(layer for layer in reversed(self.layers) if isinstance(layer, kinds))
        return type(last) in (TurboLayer, DynamicLayer, DynamicSlidingWindowLayer)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As in `Cache`: transformers 5.17 asks before it changes a state in place."""
        if layer_idx is not None:
            self._read(layer_idx, ("conv_states", "recurrent_states"), state_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As in `Cache`; refused as `update_conv_state` is: the caller may change the returned state in place."""
        self._read(layer_idx, ("conv_states",), state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As `get_conv_state`."""
        self._read(layer_idx, ("recurrent_states",), state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def _read(self, layer: int, names: Sequence[str], number: int | None) -> None:
        """A layer's states of these names are taken, if it has any: that of a number, or all."""
        linear: Any = self.layers[layer]
        if isinstance(linear, LinearAttentionCacheLayerMixin) and any(linear.has_previous_state.values()):
            now, numbers = self.mark.now, linear.has_previous_state if number is None else (number,)
            # a pass takes what the one before has left: this is a new one
            if now is not None and any((layer, f"{name} {n}") in now.stored for name in names for n in numbers):
                raise self.mark.refusal()
            self._turn(layer, f"{' or '.join(names)} {number}, to be read")
