"""What a prompt's pass stores after it has ended, so that its first token does not wait for it.

Attention over a prompt reads the new keys and values themselves, so that storing them can wait. A short prompt waits
for the host, not for the GPU: the host launches the rest of the pass first, and stores when anything asks for a layer.
"""

from threading import get_ident
from typing import Any, NamedTuple

import torch

from turbo_hf.cache.guards import ordinary
from turbo_hf.cache.integrity import Integrity, Pass
from turbo_hf.cache.new_columns import NewColumns
from turbo_hf.cache.storage import LayerStorage

MOST_BYTES = 256 << 20
"""Keys and values of all layers that may wait; more of them keep the GPU busy for longer than storing takes."""


class _New(NamedTuple):
    """As the arguments of `LayerStorage.append`."""

    layer: LayerStorage
    k: torch.Tensor
    v: torch.Tensor
    new: NewColumns
    buckets: torch.Tensor | None

    def store(self, turn: bool) -> None:
        self.layer.append(self.k, self.v, self.new, self.buckets, check_later=True, turn=turn)
        self.layer.commit(check_later=True)


class DeferredStores:
    """New tokens of a cache that are still to be stored. They are part of one pass, and are dropped if it breaks off.

    Attributes:
        wanted: whether passes may defer.
    """

    def __init__(self, integrity: Integrity):
        self.wanted = False
        self._integrity = integrity
        self._of: Pass | None = None
        self._waiting: list[_New] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(
        self,
        layer: LayerStorage,
        k: torch.Tensor,
        v: torch.Tensor,
        new: NewColumns,
        buckets: torch.Tensor | None,
        layers: int,
    ) -> bool:
        """Whether these new tokens wait; else store them now. layers: how many store as many in this pass."""
        last = self._integrity.last
        if not self.wanted or last.ended or not last.announced or last.thread != get_ident() or k.shape != v.shape:
            return False
        # a view keeps all of its memory alive
        if layers * sum(x.untyped_storage().nbytes() for x in (k, v)) > MOST_BYTES:
            return False
        if self._of is not last:
            self._of, self._waiting = last, []
        self._waiting.append(_New(layer, k, v, new, buckets))
        return True

    def drop(self) -> None:
        """Forget them: the cache is emptied, or their pass is taken back."""
        self._waiting = []

    def begin(self) -> None:
        """A pass or operation is about to begin: store them, or drop them if their own pass has broken off."""
        of = self._of
        if self._waiting and of is not None:
            if of.ended:
                self.store()
            if of.failed or self._integrity.last is not of:
                self.drop()

    def store(self) -> None:
        """Store them, if their pass is under way in this thread or has ended as it should.

        Raises:
            ValueError: as `LayerStorage.append`. The cache is then broken.
        """
        of, integrity = self._of, self._integrity
        if of is None or of is not integrity.last or of.failed:
            return
        if of.ended:
            # not a pass of its own: one that broke off could be taken back from some layers alone
            begun = integrity.begin(operation="store")
            self._store_each(turn=False)
            begun.ended = True
        elif of.thread == get_ident():
            # something reads the cache in the midst of the pass: these layers are marked as stored only now
            claimed, of.claimed = of.claimed, None
            self._store_each(turn=True)
            of.claimed = claimed

    @ordinary
    def _store_each(self, turn: bool) -> None:
        while self._waiting:
            self._waiting[0].store(turn)
            del self._waiting[0]

    def __getstate__(self) -> dict[str, Any]:
        # copies are made of what has been stored
        return {**vars(self), "_of": None, "_waiting": []}
