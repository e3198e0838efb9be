"""What users of a `DynamicCache` look for in its layers: the keys and values themselves, and copies."""

import copy
from abc import abstractmethod
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from turbo_hf.cache.open_buffer import ordinary
from turbo_hf.errors import Unsupported


class DequantizedView(CacheLayerMixin):
    """A cache layer that holds codes, and shows them as `keys` and `values`."""

    index: int

    @abstractmethod
    def dense(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest `columns` columns, dequantized: [B, Hkv, columns, D], 0 at padding."""

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys of all columns, or of the newest window - 1 of a sliding layer; None before the first pass.

        [B, Hkv, columns, D] in the model's dtype, 0 at padding; dequantized anew each time. Only to be read: the cache
        does not change with them, so torch refuses to write to them outside `torch.inference_mode`.
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

    def _shown(self, part: int) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        # an inference tensor is one that torch does not write to
        with torch.inference_mode():
            return self.dense(self.get_mask_sizes(0)[0])[part]

    def _refuse_unless_empty(self, value: torch.Tensor | None) -> None:
        # Transformers' constructor sets None
        if value is not None:
            raise Unsupported(
                f"layer {self.index}: keys and values of a TurboCache are dequantized to be read, and cannot be set. "
                "Pass new ones through update() or the model, or leave the layer dense (TurboConfig.dense_layers)."
            )

    def offload(self) -> NoReturn:
        """Refused, as `prefetch` is. Raises: Unsupported."""
        refuse_offloading()

    def prefetch(self) -> NoReturn:
        """Refused, as `offload` is. Raises: Unsupported."""
        refuse_offloading()

    @ordinary
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deep_copied(self, memo)

    def __copy__(self) -> Any:
        # tokens are stored in place: two layers that share them would overwrite each other's
        return copy.deepcopy(self)


def deep_copied(thing: Any, memo: dict[int, Any]) -> Any:
    """For `__deepcopy__`, which is `ordinary`: a copy of ordinary tensors, whatever mode is on."""
    made = memo[id(thing)] = object.__new__(type(thing))
    made.__dict__.update(copy.deepcopy(thing.__dict__, memo))
    return made


def refuse_offloading() -> NoReturn:
    """Raises: Unsupported."""
    raise Unsupported(
        "a TurboCache is not offloaded: attention reads it where it was stored. For less memory take fewer bits, or "
        'use Transformers\' own cache (cache_implementation="offloaded"), which is not compressed.'
    )
