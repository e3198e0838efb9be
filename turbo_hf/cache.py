"""`TurboCache`: the compressed KV cache as a `transformers.Cache`."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from turbo_hf.buffer import storing
from turbo_hf.chunk import Chunk, chunk_from_mask
from turbo_hf.config import DEFAULT_PRESET, ConfigLike, at_8_bit, resolve_config
from turbo_hf.crop import removable, require_recorded
from turbo_hf.errors import Unsupported
from turbo_hf.layer import TurboLayer
from turbo_hf.layer_view import deep_copied, refuse_offloading
from turbo_hf.memory import Memory, measure
from turbo_hf.model_layers import COMPRESSED_TYPES, layer_types
from turbo_hf.rows import chosen_rows, repeated_rows
from turbo_hf.selectors import Selector
from turbo_hf.transfer import require_finite


def _same_mask(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two layers of a pass were given one mask; a model over several GPUs brings each layer a copy."""
    if one is None or other is None or one.device == other.device:
        return one is other
    return one.shape == other.shape


def _stop_recording(layer: Any) -> None:
    """One of Transformers' own layers as `activate_past_recording` found it, without what it kept for a `crop`."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and layer.record_past:
        for index, state in layer.conv_states.items():
            size: Any = layer.conv_kernel_size[index]
            if state is not None:
                # cut or filled at the front, as a prompt shorter than the kernel leaves it
                layer.conv_states[index] = torch.nn.functional.pad(state, (size - state.shape[-1], 0))
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.record_past and layer.is_initialized:
        # drops what has left its window
        layer.crop(0)
    if isinstance(layer, LinearAttentionCacheLayerMixin | DynamicSlidingWindowLayer):
        layer.record_past = False


class _Planned(NamedTuple):
    """How the `tokens` columns behind `seen` earlier ones are aligned under a mask."""

    mask: torch.Tensor | None
    seen: int
    tokens: int
    chunk: Chunk


class TurboCache(Cache):
    """A KV cache in INT8, 4, 3 or 2 bit. `turbo_hf.patch` makes one for each `generate`; make one yourself for your own
    loop.

    On a patched model, attention reads the compressed values. The cache also works on any other model: it then returns
    dequantized keys and values, which is correct but slower. An unpatched model does not show the cache its padding:
    pass `attention_mask` here, or padding is stored as tokens.

    Args:
        model_config: the model's config (`model.config`).
        config: a preset's name, a `TurboConfig`, a dict of its options, or the path of a JSON or YAML file of them.
        attention_mask: [B, columns], nonzero at real tokens; only for unpatched models.
        int8_layers, dense_layers: layers kept at 8 bit and in full precision, in addition to those that `config` names.
        head_orders: for the layers named here, the KV heads in order, from the one that needs its bits most to the one
            that needs them least (`Calibration.head_orders`); the last ones get the low bits. In other layers, a row's
            first block decides.
        selectors: for the layers named here, what chooses the keys that decode steps read; other layers read all keys.
            A config with `sparse` needs them: `Handle.new_cache` passes those of the patch.

    `patch` checks the weights for layers that need 8 bit (`int8_layers="auto"`); a cache made here does not.

    Raises:
        ValueError: an unknown preset, a layer index that the model does not have, or a sparse config without selectors.
        TypeError: `model_config` is no config.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: ConfigLike = DEFAULT_PRESET,
        *,
        attention_mask: torch.Tensor | None = None,
        int8_layers: Iterable[int] = (),
        dense_layers: Iterable[int] = (),
        head_orders: Mapping[int, Sequence[int]] | None = None,
        selectors: Mapping[int, Selector] | None = None,
    ):
        if not isinstance(model_config, PreTrainedConfig):
            raise TypeError(f"model_config must be a model's config (model.config); got {type(model_config).__name__}.")
        self.turbo_config = resolve_config(config)
        if self.turbo_config.sparse is not None and selectors is None:
            raise ValueError(
                "a sparse TurboCache needs what selects its keys: patch the model and take handle.new_cache(), or pass "
                "selectors."
            )
        text_config = model_config.get_text_config(decoder=True)
        own = self.turbo_config.int8_layers
        int8 = {*int8_layers, *(() if isinstance(own, str) else own)}
        dense = {*dense_layers, *self.turbo_config.dense_layers}
        types = layer_types(text_config)
        orders, chosen_by = dict(head_orders or {}), dict(selectors or {})
        named = {"int8_layers": int8, "dense_layers": dense, "head_orders": set(orders), "selectors": set(chosen_by)}
        for name, chosen in named.items():
            outside = sorted(i for i in chosen if not 0 <= i < len(types))
            if outside:
                raise ValueError(f"{name} names layers {outside}; the model has layers 0 to {len(types) - 1}.")
        layers: list[Any] = []
        # of Transformers' own layers, what each was made with
        self._own_layers: dict[int, dict[str, Any]] = {}
        for index, (kind, kwargs) in enumerate(types):
            if kind in COMPRESSED_TYPES and index not in dense:
                chosen_config = at_8_bit(self.turbo_config) if index in int8 else self.turbo_config
                window, own_order = kwargs.get("sliding_window"), orders.get(index)
                layers.append(TurboLayer(chosen_config, window, index, own_order, chosen_by.get(index)))
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs))
                self._own_layers[index] = kwargs
        super().__init__(layers=layers)
        if attention_mask is not None:
            for layer in self.turbo_layers():
                layer.given_mask = attention_mask
        self._planned: list[_Planned] = []

    def turbo_layers(self) -> list[TurboLayer]:
        """The compressed layers."""
        return [layer for layer in self.layers if isinstance(layer, TurboLayer)]

    def chunk(self, mask: torch.Tensor | None, layer: TurboLayer, tokens: int) -> Chunk:
        """How the new columns of this pass are aligned, planned once per mask and pass and shared by the layers.

        Raises:
            ValueError: an earlier pass was interrupted, so that layers hold different numbers of tokens.
        """
        if layer.step is not None:
            return Chunk(tokens)
        if layer is next(held for held in self.layers if isinstance(held, TurboLayer)):
            # plans of an earlier pass may be for a mask that has been changed in place since
            self._planned = []
            self._require_one_length(self.layers.index(layer), tokens)
        valid = layer.valid if layer.is_initialized else None
        if mask is None and valid is None:
            return Chunk(tokens)
        columns = (layer.seen, tokens)
        chunk = next(
            (at.chunk for at in self._planned if (at.seen, at.tokens) == columns and _same_mask(at.mask, mask)), None
        )
        if chunk is None:
            chunk = chunk_from_mask(mask, *columns, valid)
            self._planned.append(_Planned(mask, *columns, chunk))
        return chunk if mask is None else chunk.on(mask.device)

    def _require_one_length(self, first: int, tokens: int) -> None:
        """ValueError unless all layers held equally many tokens before this pass, which has reached layer `first`."""
        held = {layer.seen for layer in self.turbo_layers()}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                # layers before `first` have already stored this pass's tokens
                held.add(int(layer.get_seq_length()) - (tokens if index < first else 0))
        if len(held) > 1:
            raise ValueError(
                f"layers of this TurboCache hold {' and '.join(map(str, sorted(held)))} tokens: an earlier pass "
                "ended in an error midway. reset() it, or take a new one."
            )

    def require_finite(self) -> None:
        """ValueError if NaN or Inf has been stored since the last reset; after a pass, one read per device."""
        layers = [layer for layer in self.turbo_layers() if layer.unchecked]
        if layers:
            require_finite({layer.index: layer.nonfinite for layer in layers})
        for layer in layers:
            layer.unchecked = False

    @storing
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` columns from all layers or none: ValueError as in `crop.removable`."""
        # assisted decoding of transformers 5.17 passes a tensor, which would become a part of lengths
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove <= 0 and self._rows() is None:
            # Transformers' own layers fail before the first pass
            return
        for index, layer in enumerate(self.layers):
            if isinstance(layer, TurboLayer):
                removable(layer, tokens_to_remove)
            else:
                require_recorded(layer, index, tokens_to_remove, self.get_seq_length())
        super().crop(tokens_to_remove)

    def memory(self) -> Memory:
        """Bytes by layer and kind, as currently allocated."""
        return measure(self.layers)

    @property
    def max_cache_len(self) -> int:
        """There is none. PEFT's prefix tuning asks for it to put a cache of its own in this one's place.

        Raises:
            AttributeError: always, so that `hasattr` is false.
        """
        raise AttributeError(
            "a TurboCache grows as it must, and has no max_cache_len. Prefix tuning (PEFT) brings a cache of its own: "
            "run it without the patch."
        )

    @storing
    def stop_recording(self) -> None:
        """End the recording that `activate_past_recording` began, and seal blocks that were kept open for a `crop`."""
        for layer in self.layers:
            _stop_recording(layer)
        for layer in self.turbo_layers():
            layer.record_past = False
            if layer.is_initialized:
                layer.commit()

    @storing
    def reset(self) -> None:
        """Forget every token; the cache can then take another batch."""
        self._planned = []
        for index, made_with in self._own_layers.items():
            # their own reset leaves zeros of the old batch, in place of which nothing of another shape fits
            own: Any = self.layers[index]
            own.__init__(**made_with)
        for layer in self.turbo_layers():
            layer.reset()

    # --- rows of the batch -------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i of every layer continues what row `beam_idx[i]` was: ValueError as in `rows.chosen_rows`."""
        rows = self._rows()
        if rows is not None:
            self._select_rows(chosen_rows(beam_idx, rows))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these rows of every layer: row numbers, a bool mask or a slice; ValueError as in `rows.chosen_rows`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, side by side: ValueError unless a whole number above 0."""
        rows = self._rows()
        if rows is not None:
            self._select_rows(repeated_rows(repeats, rows))

    @storing
    def _select_rows(self, index: Any) -> None:
        # layers with recurrent states have no other method for it
        super().reorder_cache(index)

    def _rows(self) -> int | None:
        """Rows of the batch; None before the first pass."""
        for layer in self.layers:
            if isinstance(layer, TurboLayer):
                if layer.is_initialized:
                    return layer.rows
                continue
            held = [getattr(layer, "keys", None), *getattr(layer, "conv_states", {}).values()]
            held += getattr(layer, "recurrent_states", {}).values()
            found = next((x for x in held if x is not None and x.dim() > 1), None)
            if found is not None:
                return len(found)
        return None

    # --- what a DynamicCache does too --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Any, Any, torch.Tensor | None]]:
        """(keys, values, window or None) of each layer, as a `DynamicCache` gives them; see `TurboLayer.keys`.

        Raises:
            Unsupported: a layer without keys (linear attention).
        """
        for index, layer in enumerate[Any](self.layers):
            if not hasattr(layer, "keys"):
                raise Unsupported(
                    f"layer {index}: a {type(layer).__name__} has no keys and values to iterate over. Take those of "
                    "the other layers: cache.layers[i].keys, cache.layers[i].values."
                )
            window = torch.tensor(layer.window) if isinstance(layer, TurboLayer) and layer.window else None
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", window)

    def offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as `prefetch` is. Raises: Unsupported."""
        refuse_offloading()

    def prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as `offload` is. Raises: Unsupported."""
        refuse_offloading()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Transformers' caches do it, in ordinary tensors also under `torch.inference_mode`."""
        return _in_ordinary_tensors(super().update_conv_state, *args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `update_conv_state`."""
        return _in_ordinary_tensors(super().update_recurrent_state, *args, **kwargs)

    @storing
    def __deepcopy__(self, memo: dict[int, Any]) -> "TurboCache":
        copied: TurboCache = deep_copied(self, memo)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if any(layer.is_initialized and layer.buffer.k.is_inference() for layer in self.turbo_layers()):
            # unpickled under `torch.inference_mode`
            self.__dict__.update(copy.deepcopy(self).__dict__)


def _in_ordinary_tensors(update: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """What an update of a state in place gives; a cache may be written again outside `torch.inference_mode`."""
    if not torch.is_inference_mode_enabled():
        return update(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return update(*args, **kwargs)
