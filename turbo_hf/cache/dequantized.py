"""The keys and values of a compressed layer, dequantized: for models without a patch, and for whoever reads a cache.

A model without a patch calls `update` and attends to what comes of it. It does not show the cache its padding: the
cache has been given a mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers.cache_utils import CacheLayerMixin

from turbo_hf.cache.pass_mark import ordinary
from turbo_hf.cache.rows import NewColumns, columns_of
from turbo_hf.cache.storage import LayerStorage
from turbo_hf.errors import Unsupported
from turbo_hf.ops.host_device import shared
from turbo_hf.ops.store.quantize import dequantize

READ_ONLY = (
    "keys and values of a TurboCache are dequantized to be read: what is written to them would not reach the cache. "
    "Write to a clone(), or leave the layer to Transformers (TurboCache(uncompressed_layers=...))."
)


class ReadOnly(torch.Tensor):
    """An ordinary tensor that refuses what writes to it, in every mode; so do its views, and what shares its memory.

    What is computed from it is a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func` on plain tensors, and look at what it has done to them. Raises: Unsupported: it has written."""
        shown: list[torch.Tensor] = []

        def plain(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            shown.append(x.as_subclass(torch.Tensor))
            return shown[-1]

        def state() -> list[tuple[int, int]]:
            return [(x._version, x.untyped_storage()._cdata) for x in shown]

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(plain, (args, kwargs or {}))
            before = state()
            result = func(*args, **kwargs)
            if state() != before:
                raise Unsupported(READ_ONLY)
            held = {memory for _, memory in before}

            def still_shown(x: Any) -> bool:
                return isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in held

            return tree_map(lambda x: x.as_subclass(cls) if still_shown(x) else x, result)


class DequantizedLayer(LayerStorage, CacheLayerMixin):
    """A layer that holds codes, and shows them as `keys` and `values`."""

    # [B, columns], nonzero at real tokens, for columns to come too; None: the cache was given none
    given_mask: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys of all columns, or of the newest window - 1 of a sliding layer; None before the first pass.

        [B, Hkv, columns, D] in the model's dtype, 0 at padding; dequantized anew each time. Only to be read: the cache
        does not change with them, so that writing to them raises `Unsupported` (`ReadOnly`).
        """
        return self._shown(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._refuse_unless_empty(value)

    @property
    def values(self) -> torch.Tensor | None:
        """The values, as `keys`."""
        return self._shown(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._refuse_unless_empty(value)

    @ordinary
    def _shown(self, part: int) -> torch.Tensor | None:
        # an inference tensor would not count what is written to it
        return self.dequantized(self.get_mask_sizes(0)[0])[part].as_subclass(ReadOnly) if self.is_initialized else None

    def _refuse_unless_empty(self, value: torch.Tensor | None) -> None:
        # Transformers' constructor sets None
        if value is not None:
            raise Unsupported(
                f"layer {self.index}: keys and values of a TurboCache are dequantized to be read, and cannot be set. "
                "Pass new ones through update() or the model, or leave the layer to Transformers "
                "(TurboCache(uncompressed_layers=...))."
            )

    def dequantized(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest `columns` columns: [B, Hkv, columns, D], 0 at padding."""
        self.mark.require_unwritten()
        seen, valid = self.seen, self.valid
        first = seen - min(columns, seen)
        k, v = dequantize(self.kv_store(), self.dtype, self.balance)
        token = torch.arange(first, seen, device=self.device).expand(self.rows, -1)
        if valid is None:
            valid = torch.ones_like(token, dtype=torch.bool)
        else:
            token, valid = (valid.cumsum(-1) - 1)[:, first:], valid[:, first:]
        token = token - shared(self.state.dropped, self.device)[:, None]
        valid = (valid & (token >= 0))[:, None, :, None]
        first, sealed = self.state.first, shared(self.state.sealed, self.device)[:, None] * self.state.block
        # a store has them behind its sealed tokens
        token = torch.where(token < first, token + sealed, token - first * (token < sealed + first))
        pick = token.clamp(min=0)[:, None, :, None]
        k, v = (torch.take_along_dim(x, pick, 2).masked_fill(~valid, 0.0) for x in (k, v))
        return k, v

    def append_and_dequantize(
        self, k: torch.Tensor, v: torch.Tensor, given_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens; return keys and values [B, Hkv, columns, D], 0 at padding (mask as in TurboCache)."""
        tokens = k.shape[2]
        self.prepare_for(k, v)
        self.seal_leftovers(tokens)
        new = self._under_given_mask(given_mask, k)
        columns = self.get_mask_sizes(tokens)[0]
        decoding = self.is_decoding(tokens)
        past = (k[:, :, :0], v[:, :, :0]) if decoding or not self.seen else self.dequantized(columns - tokens)
        self.append(new.align(k), new.align(v), new)
        joined = self.dequantized(columns) if decoding else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
        self.commit()
        return joined

    def _under_given_mask(self, mask: torch.Tensor | None, x: torch.Tensor) -> NewColumns:
        """How new keys x [B, Hkv, M, D] stand under the mask [B, columns] that the cache was given; None: no padding.

        Raises:
            ValueError: a mask of other rows.
        """
        rows, tokens = x.shape[0], x.shape[2]
        if mask is None:
            return NewColumns(tokens)
        if len(mask) != rows:
            raise ValueError(
                f"the attention_mask given to TurboCache has {len(mask)} rows; this pass brings {rows}. Give it one "
                "row for each row that runs (repeat rows for beams and returned sequences)."
            )
        valid = mask[:, self.seen : self.seen + tokens].to(x.device).bool()
        # generated tokens lie beyond the mask of the prompt, and are not padding
        return columns_of(torch.nn.functional.pad(valid, (0, tokens - valid.shape[1]), value=True))

    def require_no_given_padding(self, tokens: int) -> None:
        """ValueError if the cache was given padding in the `tokens` new columns, for which the model passes no mask."""
        mask, seen = self.given_mask, self.seen
        if mask is not None and seen < mask.shape[1] and not mask[:, seen : seen + tokens].all():
            raise ValueError(
                "the TurboCache was given an attention_mask with padding, this patched model none. Pass that "
                "mask to the model, which shows it to the cache."
            )
