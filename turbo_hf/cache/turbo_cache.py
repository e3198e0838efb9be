"""`TurboCache`: the compressed KV cache as a `transformers.Cache`."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from turbo_hf.cache.layer import TurboLayer, deep_copied, refuse_offloading
from turbo_hf.cache.memory import Memory, measure
from turbo_hf.cache.other_layers import require_recorded, stop_recording
from turbo_hf.cache.pass_mark import Pass, ordinary
from turbo_hf.cache.passes import CachePasses
from turbo_hf.cache.row_selection import chosen_rows, repeated_rows
from turbo_hf.cache.saved_cache import load, save
from turbo_hf.config.turbo_config import DEFAULT_PRESET, ConfigLike, at_8_bit, of_layer, resolve_config
from turbo_hf.errors import Unsupported
from turbo_hf.models.model_layers import LATENT_TYPES, is_compressed, layer_types
from turbo_hf.sparse.selectors import Selector

P = ParamSpec("P")


def _whole(method: Callable[Concatenate["TurboCache", P], None]) -> Callable[Concatenate["TurboCache", P], None]:
    """Decorator of an operation on all layers: it refuses a broken cache, and leaves one if it breaks off."""
    changes = ordinary(method)

    @functools.wraps(method)
    def operation(self: "TurboCache", /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.deferred.begin()
        self.mark.begin(f"{method.__name__.strip('_')}()")
        changes(self, *args, **kwargs)
        self.mark.end()

    return operation


class TurboCache(CachePasses):
    """A KV cache in INT8, 4, 3 or 2 bit. `turbo_hf.patch` makes one for each `generate`; make one yourself for your own
    loop.

    On a patched model, attention reads the compressed values. The cache also works on any other model: it then returns
    dequantized keys and values, which is correct but slower. An unpatched model does not show the cache its padding:
    pass `attention_mask` here, or padding is stored as tokens.

    Args:
        model_config: the model's config (`model.config`).
        config: a preset's name, a `TurboConfig`, a dict of its options, or the path of a JSON or YAML file of them.
        attention_mask: [B, columns], nonzero at real tokens; only for unpatched models.
        int8_layers: layers kept at 8 bit, in addition to those that `config` names.
        uncompressed_layers: layers left to Transformers' own cache, in full precision.
        head_orders: for the layers named here, the KV heads in order, from the one that needs its bits most to the one
            that needs them least (`Calibration.head_orders`); the last ones get the low bits. In other layers, those
            numbered last.
        selectors: for the layers named here, what chooses the keys that decode steps read; other layers read all keys.
            A config with `sparse` needs them: `Handle.new_cache` passes those of the patch.
        balances: for the layers named here, float32 [Hkv, D], what their keys are divided by before they are rounded;
            attention multiplies its queries by it.

    `patch` looks at the weights for layers that need a balance, or 8 bit (`int8_layers="auto"`); a cache made here does
    not.

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
        uncompressed_layers: Iterable[int] = (),
        head_orders: Mapping[int, Sequence[int]] | None = None,
        selectors: Mapping[int, Selector] | None = None,
        balances: Mapping[int, torch.Tensor] | None = None,
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
        of_config = self.turbo_config.int8_layers
        int8 = {*int8_layers, *(() if isinstance(of_config, str) else of_config)}
        dense, uncompressed = set(self.turbo_config.dense_layers), set(uncompressed_layers)
        types, latent = layer_types(text_config), text_config.model_type in LATENT_TYPES
        orders, chosen_by = dict(head_orders or {}), dict(selectors or {})
        named = {"int8_layers": int8, "dense_layers": dense, "uncompressed_layers": uncompressed}
        named |= {"head_orders": set(orders), "selectors": set(chosen_by), "balances": set(balances or {})}
        for name, chosen in named.items():
            outside = sorted(i for i in chosen if not 0 <= i < len(types))
            if outside:
                raise ValueError(f"{name} names layers {outside}; the model has layers 0 to {len(types) - 1}.")
        layers: list[Any] = []
        # what makes each of Transformers' own layers
        self.others: dict[int, Callable[[], Any]] = {}
        for index, (kind, kwargs) in enumerate(types):
            if is_compressed(kind, text_config.model_type) and index not in uncompressed:
                own = self.turbo_config
                chosen_config = at_8_bit(own) if index in int8 - dense else of_layer(own, index, len(types))
                window, own_order = kwargs.get("sliding_window"), orders.get(index)
                own_balance = (balances or {}).get(index)
                layers.append(
                    TurboLayer(chosen_config, window, index, own_order, chosen_by.get(index), latent, own_balance)
                )
            else:
                self.others[index] = functools.partial(DYNAMIC_LAYER_TYPE_MAPPING[kind], **kwargs)
                layers.append(self.others[index]())
        super().__init__(layers, attention_mask)

    def save_pretrained(self, folder: str | Path, *, input_ids: torch.Tensor | None = None) -> None:
        """Write the cache into a folder, for `from_pretrained`: one file, `turbo_cache.safetensors`.

        A saved cache that is there is replaced as a whole: whoever reads meanwhile, or after a process that was killed
        or a disk that was full, finds the former one or this one.

        Args:
            folder: may hold other files.
            input_ids: int64 [B, columns], the tokens that it holds, padding included. Those of a first pass of the
                model are known; those of later ones are not.

        Raises:
            ValueError: it is empty or broken, waits for a `crop`, or no patched model has run over it; its tokens are
                not known, or `folder` is a file.
            Unsupported: the cache of a tensor parallel model, or a layer whose state no file can hold.
            OSError: the folder cannot be written.
        """
        self.deferred.begin()
        self.mark.require_whole()
        self.require_finite()
        save(self, folder, input_ids)

    @staticmethod
    @ordinary
    def from_pretrained(folder: str | Path, model: Any) -> "TurboCache":
        """The cache that `save_pretrained` wrote, for this patched model, on its devices.

        Answers are those of the cache that was saved, bit by bit, where they are computed by the same kernels. The
        first `generate` call compares the beginning of its `input_ids` with the saved tokens.

        Raises:
            ValueError: the model is not patched; model, weights, options or versions are not those of the saved cache
                (the message names the first difference); or its file is damaged.
            Unsupported: a tensor parallel model, or one whose weights are offloaded.
            OSError: there is no saved cache.
        """
        loaded: TurboCache = load(folder, model)
        return loaded

    # --- what changes layers ---------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` columns from all layers or none: ValueError as in
        `TurboLayer.removable`, and after a pass that broke off."""
        # assisted decoding of transformers 5.17 passes a tensor, which would become a part of lengths
        tokens_to_remove = int(tokens_to_remove)
        self.mark.require_whole()
        if tokens_to_remove <= 0 and self.rows() is None:
            # Transformers' own layers fail before the first pass
            return
        for index in range(len(self.layers)):
            self._require_croppable(index, tokens_to_remove)
        self._crop(tokens_to_remove)

    def _require_croppable(self, index: int, tokens_to_remove: int) -> None:
        layer = self.layers[index]
        if isinstance(layer, TurboLayer):
            layer.removable(tokens_to_remove)
        else:
            require_recorded(layer, index, tokens_to_remove, self.get_seq_length())

    @_whole
    def _crop(self, tokens_to_remove: int) -> None:
        captured = self._captured_steps()
        if captured is None or not captured.crop(-tokens_to_remove):
            super().crop(tokens_to_remove)
        self._cut_known()

    def _captured_steps(self) -> Any:
        captured = None if self.captured is None else self.captured()
        return captured if captured is not None and captured.cache is self else None

    @_whole
    def activate_past_recording(self) -> None:
        """Wait for `crop` after each pass before dropping what it may bring back."""
        super().activate_past_recording()

    def memory(self) -> Memory:
        """Bytes by layer and kind, as currently allocated."""
        return measure(self.layers, self.mark.ranks.count)

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

    @_whole
    def stop_recording(self) -> None:
        """End the recording that `activate_past_recording` began, and seal blocks that were kept open for a `crop`."""
        for layer in self.layers:
            stop_recording(layer)
        for layer in self.turbo_layers():
            layer.stop_recording()

    @ordinary
    def reset(self) -> None:
        """Forget every token, also of a broken cache; it can then take another batch."""
        self.mark.now, self.mark.writing = Pass("reset()", None), None
        self._planned, self.decompressed = [], False
        self.know(None)
        self.deferred.drop()
        for layer in self.turbo_layers():
            layer.reset()
        for index, make in self.others.items():
            # after an exception, the layer's own `reset` might fail
            attributes = vars(self.layers[index])
            attributes.clear()
            attributes.update(vars(make()))
        self.mark.end()

    # --- rows of the batch -------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i of every layer continues what row `beam_idx[i]` was: ValueError as in `chosen_rows`."""
        self.mark.require_whole()
        rows = self.rows()
        if rows is not None:
            chosen = chosen_rows(beam_idx, rows).tolist()
            if chosen != list(range(rows)):
                self._select_rows(chosen)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these rows of every layer: row numbers, a bool mask or a slice; ValueError as in `chosen_rows`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, side by side: ValueError unless a whole number above 0."""
        self.mark.require_whole()
        rows = self.rows()
        if rows is not None:
            self._select_rows(repeated_rows(repeats, rows).tolist())

    @_whole
    def _select_rows(self, rows: list[int]) -> None:
        self._select_known(rows)
        captured = self._captured_steps()
        if captured is not None and captured.select_rows(rows):
            return
        for layer in self.layers:
            if not isinstance(layer, TurboLayer):
                # layers with recurrent states have no other method for it
                layer.reorder_cache(torch.tensor(rows))
            elif layer.is_initialized:
                layer.select_rows(rows)

    def rows(self) -> int | None:
        """Rows of the batch; None before the first pass."""
        for layer in self.layers:
            if isinstance(layer, TurboLayer):
                if layer.is_initialized:
                    return layer.rows
                continue
            states = [getattr(layer, "keys", None), *getattr(layer, "conv_states", {}).values()]
            states += getattr(layer, "recurrent_states", {}).values()
            by_row = next((x for x in states if x is not None and x.dim() > 1), None)
            if by_row is not None:
                return len(by_row)
        return None

    # --- what a DynamicCache does too --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Any, Any, torch.Tensor | None]]:
        """(keys, values, window or None) of each layer, as a `DynamicCache` gives them; see `TurboLayer.keys`.

        Raises:
            Unsupported: a layer without keys (linear attention).
            ValueError: the cache is broken.
        """
        self.mark.require_whole()
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

    @ordinary
    def __deepcopy__(self, memo: dict[int, Any]) -> "TurboCache":
        self.deferred.begin()
        copied: TurboCache = deep_copied(self, memo)
        return copied

    def __copy__(self) -> "TurboCache":
        # shallow: it shares the layers, as for any cache
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        self.deferred.begin()
        return {**self.__dict__, "captured": None, "model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if torch.is_inference_mode_enabled():
            # unpickled here, tensors could not be written outside inference mode
            self.__dict__.update(copy.deepcopy(self).__dict__)
