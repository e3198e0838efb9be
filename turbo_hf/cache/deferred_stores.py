"""What the first prompt of a cache stores after its pass, so that its first token does not wait for it.

Attention over a prompt reads the new keys and values themselves, so that storing them can wait. A short prompt waits
for the host, not for the GPU: the host launches the rest of the pass first, and stores when anything asks for a layer.
"""

from contextlib import AbstractContextManager, nullcontext
from threading import RLock, get_ident
from typing import Any, NamedTuple

import torch

from turbo_hf.cache.guards import ordinary, untraced
from turbo_hf.cache.new_columns import NewColumns
from turbo_hf.cache.pass_mark import PassMark
from turbo_hf.cache.storage import LayerStorage
from turbo_hf.ops import gpu
from turbo_hf.ops.host_device import require_finite
from turbo_hf.ranks import Ranks

MOST_BYTES = 256 << 20
"""Keys and values of all layers that may wait; more of them keep the GPU busy for longer than storing takes."""


class _New(NamedTuple):
    """As the arguments of `LayerStorage.append`. stream: on which they were computed; None on a CPU."""

    layer: LayerStorage
    k: torch.Tensor
    v: torch.Tensor
    new: NewColumns
    buckets: torch.Tensor | None
    stream: Any

    def store(self) -> None:
        # a thread that only reads the cache may have another stream
        on: AbstractContextManager[Any] = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with on:
            self.layer.append(self.k, self.v, self.new, self.buckets, check_later=True, turn=False)
            self.layer.commit(check_later=True)


class DeferredStores:
    """New tokens of a cache that are still to be stored: of the pass that stands, or of the last one.

    Attributes:
        wanted: whether the next pass may defer, if it is the cache's first. `generate` asks for it on a GPU, of a cache
            that nobody else has seen yet.
    """

    def __init__(self, mark: PassMark, wanted: bool = False):
        self.wanted = wanted
        self._mark = mark
        self._waiting: list[_New] = []
        # of several threads, one stores; the others then find it stored
        self._lock = RLock()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(
        self,
        layer: LayerStorage,
        k: torch.Tensor,
        v: torch.Tensor,
        new: NewColumns,
        buckets: torch.Tensor | None,
    ) -> bool:
        """Whether these new tokens wait; else store them now."""
        if not self.wanted or layer.is_initialized or k.shape != v.shape:
            return False
        now = self._mark.now
        if now is None or now.depth is None:
            return False
        # a view keeps all of its memory alive
        if self._mark.layers * sum(x.untyped_storage().nbytes() for x in (k, v)) > MOST_BYTES:
            return False
        # a pass that breaks off from here on has broken the cache
        self._mark.turn(layer.index)
        if k.requires_grad or v.requires_grad:
            k, v = k.detach(), v.detach()
        stream = self._stream(k) if k.is_cuda else None
        self._waiting.append(_New(layer, k, v, new, buckets, stream))
        return True

    def _stream(self, x: torch.Tensor) -> Any:
        """The current stream of the device of x: the object that the layer before has, where it is the same."""
        last = self._waiting[-1].stream if self._waiting else None
        if last is not None and last.device == x.device and last.cuda_stream == gpu.stream(x.device):
            return last
        return torch.cuda.current_stream(x.device)

    def require_finite(self, ranks: Ranks) -> None:
        """ValueError if the newest layer's keys or values hold NaN or Inf, as those of all layers behind NaN do."""
        if self._waiting:
            layer, k, v, new, *_ = self._waiting[-1]
            # few launches, as the first token waits for them: 0 times NaN or Inf is NaN
            norms = [torch.linalg.vector_norm(new.blank(x), torch.inf) for x in (k, v) if x.numel()]
            if norms:
                require_finite({layer.index: (torch.stack(norms) * 0).sum().ne(0)}, ranks)

    def drop(self) -> None:
        """Forget them: the cache is emptied."""
        self._waiting = []

    def hollow(self) -> None:
        """Replace the tensors by their shapes, which `memory()` may still ask for."""
        zeros: dict[Any, torch.Tensor] = {}

        def zero(x: torch.Tensor) -> torch.Tensor:
            like = x.shape, x.dtype, x.device
            if like not in zeros:
                zeros[like] = x.new_zeros(()).expand_as(x)
            return zeros[like]

        self._waiting = [waiting._replace(k=zero(waiting.k), v=zero(waiting.v)) for waiting in self._waiting]

    def begin(self) -> None:
        """A pass or operation is about to begin: store them, unless their own pass still stands."""
        # waits for another thread that stores
        with self._lock:
            if self._mark.now is None:
                self.store()

    @untraced
    def store(self) -> None:
        """Store them, if their pass is under way in this thread or has ended as it should.

        Raises:
            ValueError: as `LayerStorage.append`. The cache is then broken.
        """
        with self._lock:
            now = self._mark.now
            if not self._waiting:
                return
            if now is None:
                self._mark.begin("store()")
                self._store_each()
                self._mark.end()
            elif now.thread == get_ident():
                # something reads the cache in the midst of the pass
                self._store_each()

    @ordinary
    def _store_each(self) -> None:
        self.wanted = False
        while self._waiting:
            self._waiting[0].store()
            del self._waiting[0]

    def __getstate__(self) -> dict[str, Any]:
        # copies are made of what has been stored
        return {"mark": self._mark, "wanted": self.wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DeferredStores.__init__(self, **state)
