"""What a forward pass calls of the compressed cache, and what the first prompt stores after its pass.

Attention over a prompt reads the new keys and values themselves, so that storing them can wait. A short prompt waits
for the host, not for the GPU: the host launches the rest of the pass first, and stores when anything asks for a layer.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from threading import RLock, get_ident
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.other_layers import MarkedUpdates
from turbo_hf.cache.page_pool import PageTable
from turbo_hf.cache.pass_mark import PassMark, ordinary, untraced
from turbo_hf.cache.rows import NewColumns, Planned, columns_from_mask
from turbo_hf.cache.storage import LayerStorage
from turbo_hf.ops import gpu
from turbo_hf.ops.host_device import require_finite
from turbo_hf.ranks import ALONE, Ranks

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


class CachePasses(MarkedUpdates):
    """The part of a `TurboCache` that a forward pass calls, and what belongs to all layers. It knows its tokens, as far
    as whoever passes them shows them."""

    # [B, n], the first n columns, padding included; None: not known
    _known: torch.Tensor | None = None
    # the columns of the whole input of a `generate` call that was not compared with this cache yet; None: compared
    _to_compare: int | None = None

    def __init__(self, layers: list[Any], given_mask: torch.Tensor | None = None):
        self.all_layers: list[Any] = []
        super().__init__(layers=layers)
        self.mark = PassMark(sum(isinstance(layer, CacheLayerMixin) for layer in layers))
        self.deferred, empty = DeferredStores(self.mark), PageTable()
        for layer in self.turbo_layers():
            layer.mark, layer.empty, layer.given_mask = self.mark, empty, given_mask
        # of the pass under way, by mask
        self._planned: list[Planned] = []
        # the captured steps over this cache (`ReplayableSteps`; not over a copy of it), which change it in place
        self.captured: weakref.ref[Any] | None = None
        # whether some pass could not be served compressed: the next may not be, either
        self.decompressed = False
        # the patched model that has run over it
        self.model: weakref.ref[Any] | None = None

    @property
    def layers(self) -> list[Any]:
        """All layers. What a prompt's pass has left to be stored later is stored first."""
        if self.deferred:
            self.deferred.store()
        return self.all_layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self.all_layers = layers

    def turbo_layers(self) -> list[TurboLayer]:
        """The compressed layers."""
        return [layer for layer in self.layers if isinstance(layer, TurboLayer)]

    def new_columns(self, mask: torch.Tensor | None, layer: TurboLayer, tokens: int) -> NewColumns:
        """How the new columns of this pass are aligned, planned once per mask and pass and shared by the layers.

        Raises:
            ValueError: an earlier pass was interrupted, so that layers hold different numbers of tokens.
        """
        if layer.replay is not None:
            # it has been checked before
            return NewColumns(tokens)
        for index, each in enumerate(self.all_layers):
            if layer is each:
                # plans of an earlier pass may be for a mask that has been changed in place since
                self._planned = []
                self._require_one_length(index, tokens)
            if isinstance(each, TurboLayer):
                break
        seen = layer.seen
        for at in self._planned:
            if at.seen == seen and at.tokens == tokens and at.under(mask):
                return at.new if mask is None else at.new.on(mask.device)
        if mask is None and layer.given_mask is not None:
            layer.require_no_given_padding(tokens)
        new = columns_from_mask(mask, seen, tokens, layer.valid)
        self._planned.append(Planned(mask, seen, tokens, new))
        return new

    def _require_one_length(self, first: int, tokens: int) -> None:
        """ValueError unless all layers held equally many tokens before this pass, which has reached layer `first`."""
        lengths = {layer.seen for layer in self.turbo_layers()}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                # layers before `first` have already stored this pass's tokens
                lengths.add(int(layer.get_seq_length()) - (tokens if index < first else 0))
        if len(lengths) > 1:
            raise ValueError(
                f"layers of this TurboCache hold {' and '.join(map(str, sorted(lengths)))} tokens: an earlier pass "
                "ended in an error midway. reset() it, or take a new one."
            )

    def begin_pass(self, depth: int, model: Any = None, ids: Any = None) -> None:
        """A module that calls all layers begins (`PassMark.enter`).

        model: the module, if it is the model itself. ids: the tokens that it was given.

        Raises:
            ValueError: an earlier pass or call broke off, for NaN or anything else; or another thread uses the cache.
        """
        # what the last pass has left is stored
        self.deferred.begin()
        try:
            self.mark.enter(depth)
        except ValueError:
            # report NaN first if that is the cause; a local check, as other ranks may go on
            self._require_finite(ALONE)
            raise
        if model is not None and (self.model is None or self.model() is not model):
            self.model = weakref.ref(model)
        if model is not None and not self.get_seq_length():
            self.know(ids.detach().clone() if isinstance(ids, torch.Tensor) else None)

    def store_prompt(
        self, layer: TurboLayer, k: torch.Tensor, v: torch.Tensor, new: NewColumns, buckets: torch.Tensor | None
    ) -> None:
        """Store what a prompt's pass brings to a layer, as `TurboLayer.append` does; or after the pass (`deferred`)."""
        if not self.deferred.take(layer, k, v, new, buckets):
            layer.append(k, v, new, buckets, check_later=True)
            layer.commit(check_later=True)

    def require_finite(self) -> None:
        """ValueError if NaN or Inf has been stored since the last reset; after a pass, one read per device.

        Of a tensor parallel model every rank must call it, and all raise the error if one of them has cause to.
        """
        self._require_finite(self.mark.ranks)

    def _require_finite(self, ranks: Ranks) -> None:
        self.deferred.require_finite(ranks)
        layers = [layer for layer in self.all_layers if isinstance(layer, TurboLayer) and layer.unchecked]
        if layers:
            require_finite({layer.index: layer.nonfinite for layer in layers}, ranks)
        for layer in layers:
            layer.unchecked = False

    def know(self, ids: torch.Tensor | None) -> None:
        """Note the tokens [B, columns] that a cache holds, or will once a pass is over; None: they are not known."""
        self._known = ids

    def known_ids(self) -> torch.Tensor | None:
        """int64 [B, columns], its tokens, padding included; None: not all of them are known."""
        ids = self._known
        return ids if ids is not None and ids.dim() == 2 and ids.shape[1] == self.get_seq_length() else None

    def require_more(self, columns: int) -> None:
        """A `generate` call over this cache begins. columns: of its whole input; 0: they are not known.

        Raises:
            ValueError: the cache holds as many or more. Transformers would take some of the input's end for new.
        """
        seen = self.get_seq_length()
        if columns and seen >= columns:
            raise ValueError(
                f"this cache holds {seen} columns, and the input has {columns}: pass what the cache holds and at "
                "least one token more, or crop the cache, or take a new one."
            )
        self._to_compare = columns

    def drafts_follow(self, columns: int) -> None:
        """The first step of that call adds drafts to its input. columns: of the input without them, as in `compare`."""
        if self._to_compare is not None and columns < self._to_compare:
            self._to_compare = None

    def compare(self, columns: int, ids: torch.Tensor | None) -> int | None:
        """The first step of that call begins. columns: of its input; fewer than the whole are new ones. ids: the input
        [B, columns]; None: embeddings.

        Returns:
            How many columns of an input that is whole are new; None: it is not whole, or nothing is cached.

        Raises:
            ValueError: the cache holds the keys and values of other tokens.
        """
        due, self._to_compare = self._to_compare, None
        # of all steps but the first nothing is due
        if not due or due > columns or not (seen := self.get_seq_length()):
            return None
        known = self._known
        if ids is not None and known is not None and ids.dim() == known.dim() == 2:
            valid = next((layer.valid for layer in self.turbo_layers() if layer.is_initialized), None)
            _require_same(known.to(ids.device), ids, valid)
        return columns - seen

    def _cut_known(self) -> None:
        if self._known is not None:
            self._known = self._known[:, : self.get_seq_length()]

    def _select_known(self, rows: list[int]) -> None:
        if self._known is not None:
            self._known = self._known[rows]


def _require_same(own: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor | None) -> None:
    """ValueError unless `ids`, the whole input of a `generate` call, begin with the tokens `own`.

    own: the first tokens of a cache. valid: bool [B, columns of the cache], which are no padding; None: all.
    """
    if len(own) != len(ids):
        raise ValueError(
            f"this cache holds {len(own)} rows, and input_ids has {len(ids)}. Repeat its rows for beams and "
            "returned sequences: cache.batch_repeat_interleave(n)."
        )
    differs = own != ids[:, : own.shape[1]]
    if valid is not None:
        differs &= valid.to(ids.device)[:, : own.shape[1]]
    for row, column in differs.nonzero()[:1].tolist():
        raise ValueError(
            f"input_ids does not begin with the prompt of this cache: row {row} has token {int(ids[row, column])} in "
            f"column {column}, the cache {int(own[row, column])}. Crop the cache to the common tokens, or take a new "
            "one."
        )
