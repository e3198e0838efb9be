"""The view of a TurboCache that one call of a patched model's attention module gets."""

import functools
from typing import Any

import torch

from turbo_hf.cache.guards import untraced
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import Unsupported


class ClaimedCache(TurboCache):
    """A TurboCache as one call of a patched model's attention module sees it: `update` of the claimed layer passes the
    new tokens on to the attention function, which stores them.

    All else is the cache's own: both have one `__dict__`. The claim is not part of it, so that it ends with the call,
    wherever that breaks off: no later `update` of the cache finds it. `claimed` makes one.

    Attributes:
        claims: the index of the claimed layer, until its `update`.
        given: the keys and values that this `update` has returned.
    """

    __slots__ = ("claims", "given")
    claims: int | None
    given: tuple[torch.Tensor, torch.Tensor] | None

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values themselves, once; for other layers, and from then on, as in `TurboCache`."""
        # a copy of a view claims nothing
        if layer_idx == getattr(self, "claims", None):
            self.claims, self.given = None, (key_states, value_states)
            return self.given
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a view is pickled as what it shows
        cache: Any = object.__new__(type(self).__bases__[0])
        cache.__dict__ = self.__dict__
        return _itself, (cache,)


def _itself(cache: TurboCache) -> TurboCache:
    return cache


@functools.cache
def _claimed_class(of: type[TurboCache]) -> type[ClaimedCache]:
    """A ClaimedCache that keeps what a subclass of TurboCache overrides."""
    if issubclass(of, ClaimedCache):
        return of
    try:
        return (
            ClaimedCache if of is TurboCache else type(f"Claimed{of.__name__}", (of, ClaimedCache), {"__slots__": ()})
        )
    except TypeError as error:
        raise Unsupported(
            f"{of.__name__} cannot be used here ({error}): derive it from TurboCache without __slots__."
        ) from error


def claimed(cache: TurboCache, layer: int) -> ClaimedCache:
    """The cache as one call of the attention module of a layer sees it."""
    view: ClaimedCache = object.__new__(_claimed_class(type(cache)))  # type: ignore[arg-type]  # a class has a hash
    view.__dict__ = cache.__dict__
    view.claims, view.given = layer, None
    return view
