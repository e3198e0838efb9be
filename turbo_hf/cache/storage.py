"""What a layer of the compressed cache stores, and how: the part of it that the attention function calls."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from turbo_hf.cache.index_keys import IndexKeys
from turbo_hf.cache.page_pool import OpenBuffer, PagePool, PageTable
from turbo_hf.cache.pass_mark import PassMark, ordinary, storing
from turbo_hf.cache.rows import DeviceCounts, NewColumns, RowState
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import UNQUANTIZED, KVStore, type_16bit
from turbo_hf.ops.checks import check_float
from turbo_hf.ops.host_device import require_finite, shared
from turbo_hf.ops.layer_ops import LayerOps, ops_of
from turbo_hf.sparse.bucket_index import BucketIndex
from turbo_hf.sparse.selectors import Selector

DECODE_TOKENS = 16
"""Up to this many new tokens over a past count as decoding: they are stored before attention reads the cache."""

DRAFTED_TOKENS = 32
"""The same while blocks wait for a `crop`: Transformers drafts up to 20 tokens unless told otherwise."""


class ReplayState(NamedTuple):
    """A step that may be replayed: `ReplayableSteps` does the host's counting for it.

    sealed: blocks of each row once the step has sealed those that are due.
    plans: as in `KVStore`.
    arrived: int32 [B], zeros, as in `StoreOps.append_step`.
    seals: whether the step itself seals what is due, and stores one token per row; else any number, and blocks wait.
    """

    sealed: tuple[int, ...]
    plans: dict[Any, Any]
    arrived: torch.Tensor
    seals: bool = True


class LayerStorage:
    """Keys and values of one layer: sealed pages and an open INT8 buffer.

    `state` holds what the host counts, which may be the same for several layers; everything else is of this layer.
    """

    is_initialized: bool
    # chosen by the first keys (`prepare_for`)
    ops: LayerOps

    def __init__(
        self,
        config: TurboConfig,
        window: int | None = None,
        index: int = 0,
        head_order: Sequence[int] | None = None,
        selector: Selector | None = None,
        latent: bool = False,
        balance: torch.Tensor | None = None,
    ):
        super().__init__()
        self.selector, self.latent = selector, latent
        # float32 [Hkv, D], what stored keys are divided by; 16-bit ones by nothing
        self.balance = None if config.bits == UNQUANTIZED else balance
        self.config, self.window, self.index, self.head_order = config, window, index, head_order
        # shared by all layers of a cache
        self.mark, self.empty = PassMark(1), PageTable()
        self.name = f"layer {index}"
        self.is_sliding = window is not None
        # whose order of tokens has a meaning, or whose store kernels seal all of them: `layout`
        first = 0 if window is not None or selector is not None or latent else config.first_tokens
        recent = 0 if latent else config.recent
        self.state = RowState(config.expert.block_size, [], [], [], [], recent=recent, first=first)
        # bool [B, columns], which of the first columns hold a token; None: all of them
        self.valid_prefix: torch.Tensor | None = None
        # whether `nonfinite`, which kernels set, is still to be read
        self.unchecked = False
        # set while the pass is a step that may be replayed
        self.replay: ReplayState | None = None
        # of layers with an indexer, from their first keys on
        self.index_keys: IndexKeys | None = None
        # what `ops` were chosen for
        self.chosen_for: tuple[torch.dtype, torch.device] | None = None

    @ordinary
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch, heads, head dim, dtype and device from the first keys."""
        alike = value_states.shape[:-1] if self.latent else value_states.shape
        if key_states.shape[: len(alike)] != alike:
            raise ValueError(
                f"layer {self.index}: keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} differ in "
                "shape; only one head dim is compressed. Leave the layer to Transformers "
                "(TurboCache(uncompressed_layers=...))."
            )
        check_float("keys", key_states)
        rows, self.heads, _, self.dim = key_states.shape
        self.rotary_dim = value_states.shape[-1] if self.latent else None
        self.dtype, self.device = key_states.dtype, key_states.device
        self.prepare_for(key_states, value_states)
        # an error of backend "triton" comes before anything is stored
        _ = self.in_place
        order = list(range(self.heads) if self.head_order is None else self.head_order)
        if sorted(order) != list(range(self.heads)):
            raise ValueError(
                f"layer {self.index}: head_order must name each of its {self.heads} KV heads once; got {order}."
            )
        self.balance = None if self.balance is None else self.balance.to(self.device)
        groups = self.config.head_groups(self.heads)
        block, dtype_16bit = self.config.expert.block_size, type_16bit(self.dtype)
        table = self.empty.with_rows(rows)
        self.pool = PagePool(table, groups, self.dim, block, self.device, dtype_16bit, self.rotary_dim)
        self.bucket_index = BucketIndex(rows, self.heads, block, self.selector, self.device)
        opened = dtype_16bit if UNQUANTIZED in dict(groups) else torch.int8
        buffer = (opened, key_states.shape[2], self.rotary_dim)
        self.buffer = OpenBuffer(rows, self.heads, self.dim, self.device, *buffer, self.state.first)
        self.device_counts = DeviceCounts(self.device)
        self.order = shared(order * rows, self.device).view(rows, self.heads)
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.state = self.state.with_rows(rows)
        self.is_initialized = True

    @property
    def in_place(self) -> bool:
        """Whether a kernel stores new tokens."""
        return self.ops.store_kernels

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first pass."""
        return len(self.state.open)

    @property
    def seen(self) -> int:
        """Columns of all passes, padding included, because that is what Transformers asks for."""
        return self.state.seen

    @property
    def valid(self) -> torch.Tensor | None:
        """bool [B, seen], which columns hold a token; None: all do."""
        valid = self.valid_prefix
        if valid is None or valid.shape[1] == self.seen:
            return valid
        # later columns came without a mask: all hold tokens
        return torch.nn.functional.pad(valid, (0, self.seen - valid.shape[1]), value=True)

    def lengths(self) -> list[int]:
        """Tokens held by each row (older ones may have left a sliding window)."""
        return self.state.lengths()

    def is_decoding(self, tokens: int) -> bool:
        """Whether `tokens` new tokens are stored before attention reads the cache."""
        # sparse steps and latents have limits of their own
        drafts = self.state.recording and self.selector is None and not self.latent
        return self.seen > 0 and tokens <= (DRAFTED_TOKENS if drafts else DECODE_TOKENS)

    def kv_store(self) -> KVStore:
        """The layer as ops see it; views, not copies."""
        state, counts, replay = self.state, self.device_counts, self.replay
        places = (self.order, self.pool.table.on(self.device), counts.sealed(state))
        opened = (*self.buffer.tensors(), counts.open(state))
        known, plans = (tuple(state.sealed), None) if replay is None else (replay.sealed, replay.plans)
        return KVStore(self.pool.paged, *places, *opened, self.pool.block, known, plans, state.first, state.recent)

    def prepare_for(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Choose the layer's ops by the first keys and values [B, Hkv, M, D]; anew for another dtype or device.

        Raises:
            ValueError: other rows, heads or channels than the cache holds.
        """
        rows, heads, _, dim = k.shape
        if self.is_initialized and (rows != self.rows or heads != self.heads or dim != self.dim):
            raise ValueError(
                f"layer {self.index}: the cache holds {self.rows} rows of {self.heads} heads of {self.dim} channels; "
                f"this pass brings {rows} of {heads} of {dim}. Use a new TurboCache, or reset() this one."
            )
        kind = (k.dtype, k.device)
        if kind != self.chosen_for:
            self.ops = ops_of(self.config, k, self.config.head_groups(heads), v.shape[-1] if self.latent else None)
            self.chosen_for = kind

    def seal_leftovers(self, tokens: int, check_later: bool = False) -> None:
        """Seal the blocks that replayed steps have filled, unless another replayed step follows, which does it.

        And those of a first prompt that waits for a `crop`, as steps over a draft follow it. tokens: new tokens of the
        coming pass. check_later: as in `append`.
        """
        waits = self.is_initialized and self.replay is None and self.state.is_due()
        # the rest of a prompt is sorted together with the part that is still open
        if waits and (self.state.decoded or self.is_decoding(tokens)):
            self.mark.require_unwritten()
            self.commit(check_later, whole_prompt=True)
            self.seal_prompt()

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        new: NewColumns,
        buckets: torch.Tensor | None = None,
        check_later: bool = False,
        turn: bool = True,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Quantize new tokens into the open buffer. k, v: [B, Hkv, M, D], aligned by `new`, as are their buckets.

        check_later: NaN and Inf that kernels have noted are read later (`unchecked`), for all layers at once.
        turn: whether this is the layer's turn in a pass; else it has had it, and what it left is stored now.
        queries: of these tokens; returned as they meet the stored keys, perhaps in memory that the next step writes.

        Raises:
            ValueError: other rows or heads than the cache holds, NaN or Inf, or a broken cache.
        """
        self.prepare_for(k, v)
        if not self.is_initialized:
            # columns before the longest row's first token are padding in every row
            first = min(new.starts or [0])
            self.lazy_initialization(k[:, :, first:], v[:, :, first:])
        if self.replay is None and not self.in_place:
            # refuse before anything is written; a collective, so that every rank asks
            self._require_finite(new.blank(k), new.blank(v))
        if turn:
            self.mark.turn(self.index)
        balanced = self._append(k, v, new, buckets, check_later, None if self.balance is None else queries)
        return queries if balanced is None else balanced

    @ordinary
    def _require_finite(self, *stored: torch.Tensor) -> None:
        """ValueError if new keys or values hold NaN or Inf, or numbers that overflow the type that stores them."""
        dtype = self.buffer.k.dtype if self.buffer.k.is_floating_point() else torch.float32
        # aminmax returns NaN twice if there is one
        extremes = [end for x in stored if x.numel() for end in torch.aminmax(x.to(dtype))]
        if extremes:
            require_finite({self.index: ~torch.isfinite(torch.stack(extremes)).all()}, self.mark.ranks)

    @storing
    def _append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        new: NewColumns,
        buckets: torch.Tensor | None,
        check_later: bool,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        how: dict[str, Any] = {"nonfinite": self.nonfinite, "queries": queries, "balance": self.balance}
        if self.replay is not None:
            how["arrived"] = self.replay.arrived
            if self.replay.seals:
                return self.ops.append_step(k, v, self.kv_store(), noted=self.bucket_index.noted(buckets), **how)
            return self.ops.append_tokens(k, v, self.kv_store(), **how)
        state, decoding = self.state, self.is_decoding(new.tokens)
        after = state.stored(new.tokens, new.starts, decoding)
        if self.selector is not None:
            self.bucket_index.append(buckets, state.lengths(), new.tokens, new.starts)
        room = max(after.open)
        if decoding and self.in_place:
            # a block, so that not every sixteenth step makes room
            room = max(room, self.config.expert.block_size + state.staying)
        self.buffer.reserve(room, state.open)
        balanced = self.ops.append_tokens(k, v, self.kv_store(), starts=new.starts_on(self.device), **how)
        self.device_counts.counted(state, after)
        if new.valid is not None:
            valid = self.valid
            if valid is None:
                valid = torch.ones(self.rows, self.seen, dtype=torch.bool, device=self.device)
            self.valid_prefix = torch.cat((valid, new.valid.to(self.device)), 1)
        self.state = after
        if self.in_place and not decoding:
            self._check_finite(check_later)
        return balanced

    def _check_finite(self, check_later: bool) -> None:
        """ValueError if kernels have noted NaN or Inf; check_later: left to `TurboCache.require_finite`."""
        self.unchecked = True
        if not check_later:
            require_finite({self.index: self.nonfinite}, self.mark.ranks)
            self.unchecked = False

    def commit(self, check_later: bool = False, whole_prompt: bool = False) -> None:
        """Seal every whole block of open tokens, and drop what has left the window. Waits while `recording`.

        The newest tokens of a prompt that is sorted by bucket stay open until no more of it can come (`whole_prompt`).
        """
        if not self.state.recording and self.replay is None and self._may_commit():
            self._commit(check_later, whole_prompt)
        self.mark.settle()

    def _may_commit(self) -> bool:
        """Whether a block is whole, or may have left the window."""
        return self.window is not None or self.state.is_due()

    def seal_prompt(self) -> None:
        """Seal a first prompt but for its last block or two, also while `recording`: no draft reaches further back."""
        state = self.state
        if state.waits() and self.selector is None and max(state.open) > 2 * state.block + state.staying:
            self._commit(check_later=True, kept=self.config.expert.block_size)

    @storing
    def _commit(self, check_later: bool = False, whole_prompt: bool = False, kept: int = 0) -> None:
        """As `commit`; the newest `kept` tokens stay open."""
        if not self._may_commit():
            return
        before, pool, buffer, index = self.state, self.pool, self.buffer, self.bucket_index
        sorts = self.selector is not None and index.sorts
        block, lengths, whole = before.block, before.lengths(), before.whole(kept)
        if sorts and not (whole_prompt or before.decoded):
            whole = [max(0, end - sealed) for end, sealed in zip(index.outside(lengths), before.sealed, strict=True)]
        gone = before.leaving(self.window, kept)
        # what has left the window: sealed blocks, and open ones, which are not sealed
        leaving = list(map(min, gone, before.sealed))
        skipped = [min(n - left, count) for n, left, count in zip(gone, leaving, whole, strict=True)]
        if not any(whole) and not any(leaving):
            return
        # a block is final: NaN or Inf noted for its tokens must be reported
        self._check_finite(check_later)
        to_sort = index.sortable(before.sealed, lengths, before.turn_start) if sorts else []
        if any(leaving):
            pool.follow(pool.table.drop_front(before.sealed, leaving))
            self.state = before = before.without_front(leaving)
        sealing = list(map(operator.sub, whole, skipped))
        if any(sealing):
            self.state = before._replace(sealed=list(map(operator.add, before.sealed, sealing)))
            pool.follow(pool.table.reserve(before.sealed, sealing))
            for row, blocks in enumerate(to_sort):
                if blocks:
                    buffer.reorder(row, (blocks.start - before.sealed[row]) * block, index.sort(row, blocks))
            self.seal(before, whole)
        if any(whole):
            opened = [held - n * block for held, n in zip(before.open, whole, strict=True)]
            # in steady decoding no token moves, and the memory serves the next block
            steady = before.decoded and self.in_place
            if steady and before.recent:
                buffer.drop_front_in_place([n * block for n in whole], opened)
            else:
                buffer.drop_front([n * block for n in whole], opened, block + before.first if steady else 0)
            dropped = [held + n * block for held, n in zip(before.dropped, skipped, strict=True)]
            self.state = self.state._replace(open=opened, dropped=dropped)

    def seal(self, before: RowState, whole: list[int]) -> None:
        """Seal the oldest `whole[row]` blocks of open tokens of each row, for which there are pages.

        They are sealed in `state` already, and open in `before`.
        """
        store = self.kv_store()
        if whole != before.whole():
            # the op seals every whole block among `open_len` tokens, but for those that stay
            store = store._replace(open_len=shared([before.staying + n * before.block for n in whole], self.device))
        self.ops.seal_open(store, max(whole))
