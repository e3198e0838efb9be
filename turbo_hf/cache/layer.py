"""One layer of the compressed cache, as Transformers and the attention function see it."""

from collections.abc import Sequence
from typing import Any

import torch

from turbo_hf.cache.compiling import untraced
from turbo_hf.cache.integrity import Integrity
from turbo_hf.cache.layer_view import DequantizedView
from turbo_hf.cache.new_columns import Chunk, Step, chunk_from_given_mask
from turbo_hf.cache.open_buffer import OpenBuffer, Quantized, ordinary, storing
from turbo_hf.cache.page_pool import PagePool
from turbo_hf.cache.rows import chosen_rows, repeated_rows
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import UNQUANTIZED, KVStore, type_16bit
from turbo_hf.ops.backend import kernel_obstacle, uses_triton
from turbo_hf.ops.host_device import require_finite, shared
from turbo_hf.ops.store.append import append_step, append_tokens, seal_open
from turbo_hf.ops.store.quantize import dequantize
from turbo_hf.ops.store.rotate import rotate_keys
from turbo_hf.sparse.bucket_index import BucketIndex
from turbo_hf.sparse.selectors import Selector

DECODE_TOKENS = 16
"""Up to this many new tokens over a past count as decoding: they are stored before attention reads the cache."""

HELD = (
    *("rows", "pool", "buffer", "bucket_index", "order", "ranked"),
    *("dropped", "turn_start", "valid_prefix", "universal", "nonfinite"),
)
"""Attributes of a layer that holds tokens."""


class TurboLayer(DequantizedView):
    """Keys and values of one attention layer: sealed pages and an open INT8 buffer, with one length per row.

    Padding is not stored: each row begins at its first real token, so its blocks and scales are the same alone and in
    any batch. `seen` counts columns, including padding, because that is what Transformers asks for.

    Args:
        config: widths, block size, buffer scale.
        window: how many tokens a query sees, including itself; None: all. Older whole blocks are dropped.
        index: the layer's number, for messages.
        head_order: KV heads from the one that needs its bits most to the one that needs them least; None: each row's
            first block tells. selector: decode steps read the keys that it chooses; None: all keys.
    """

    is_croppable = True

    def __init__(
        self,
        config: TurboConfig,
        window: int | None = None,
        index: int = 0,
        head_order: Sequence[int] | None = None,
        selector: Selector | None = None,
    ):
        super().__init__()
        self.selector = selector
        self.config, self.window, self.index, self.head_order = config, window, index, head_order
        # of its cache, which all of its layers share
        self.integrity, self.name = Integrity({index: type(self).__name__}), f"layer {index}"
        self.is_sliding = window is not None
        # unchecked: what kernels have noted in `nonfinite` is still to be read
        self.record_past = self.claimed = self.unchecked = self.decoded = False
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.given_mask: torch.Tensor | None = None
        self.step: Step | None = None
        self.seen = 0

    @ordinary
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch, heads, head dim, dtype and device from the first keys."""
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"layer {self.index}: keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} differ in "
                "shape; only one head dim is compressed. Leave the layer dense (TurboConfig.dense_layers)."
            )
        self.rows, self.heads, _, self.dim = key_states.shape
        self.dtype, self.device, self.obstacle = key_states.dtype, key_states.device, kernel_obstacle(key_states)
        order = list(range(self.heads) if self.head_order is None else self.head_order)
        if sorted(order) != list(range(self.heads)):
            raise ValueError(
                f"layer {self.index}: head_order must name each of its {self.heads} KV heads once; got {order}."
            )
        groups = self.config.head_groups(self.heads)
        block, full = self.config.block_size, type_16bit(self.dtype)
        self.pool = PagePool(self.rows, groups, self.dim, block, self.device, full)
        self.bucket_index = BucketIndex(self.rows, self.heads, block, self.selector, self.device)
        opened = full if UNQUANTIZED in dict(groups) else torch.int8
        self.buffer = OpenBuffer(self.rows, self.heads, self.dim, self.device, opened, key_states.shape[2])
        self.order = shared(order * self.rows, self.device).view(self.rows, self.heads)
        # no rank to find: one width for all heads, or an order that was given
        self.preranked = len(groups) == 1 or self.head_order is not None
        self.ranked = [self.preranked] * self.rows
        self.dropped, self.turn_start = [0] * self.rows, [0] * self.rows
        self.valid_prefix: torch.Tensor | None = None
        ranged = self.config.buffer_scale == "universal"
        self.universal = torch.zeros(self.rows, self.heads, 2, device=self.device) if ranged else None
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def reset(self) -> None:
        """Drop every token and release the memory; the layer can then take another batch."""
        self.is_initialized = self.claimed = self.unchecked = self.decoded = self.record_past = False
        self.seen, self.pending, self.given_mask, self.step = 0, None, None, None
        # an earlier reset may have broken off between two of them
        for held in HELD:
            self.__dict__.pop(held, None)

    def lengths(self) -> list[int]:
        """Tokens held by each row (older ones may have left a sliding window)."""
        block = self.config.block_size
        return [n * block + m for n, m in zip(self.pool.sealed, self.buffer.length, strict=True)]

    @property
    def valid(self) -> torch.Tensor | None:
        """bool [B, seen], which columns hold a token; None: all do."""
        valid = self.valid_prefix
        if valid is not None and valid.shape[1] < self.seen:
            # columns without a mask of their own
            self.valid_prefix = valid = torch.nn.functional.pad(valid, (0, self.seen - valid.shape[1]), value=True)
        return valid

    def get_seq_length(self) -> int:
        """Columns seen, including padding."""
        return self.seen

    def get_max_length(self) -> int:
        """The window of a sliding layer; -1: no limit."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, first column) that a mask for `query_length` new tokens covers."""
        past = self.seen if self.window is None else min(self.seen, self.window - 1)
        return past + query_length, self.seen - past

    def activate_past_recording(self) -> None:
        """Wait for `crop` after each pass before sealing a block or leaving a window (assisted decoding)."""
        self.record_past = True

    # --- what the attention function calls ---------------------------------------------------------------------

    def is_decoding(self, tokens: int) -> bool:
        """Whether `tokens` new tokens are stored before attention reads the cache."""
        return self.seen > 0 and tokens <= DECODE_TOKENS

    def store(self) -> KVStore:
        """The layer as an op sees it; views, not copies."""
        pool, step, opened = self.pool, self.step, self.buffer.tensors()
        places = (self.order, pool.device_table(), pool.device_sealed())
        known, plans = (tuple(pool.sealed), None) if step is None else (step.sealed, step.plans)
        return KVStore(pool.paged, *places, *opened, pool.block, known, plans)

    def check(self, k: torch.Tensor, defer: bool = False) -> None:
        """ValueError unless new keys [B, Hkv, M, D] have the rows and heads that the cache holds.

        Blocks that a `Step` has left full are sealed here, if no further one follows that does it.
        """
        waits = self.is_initialized and self.step is None and max(self.buffer.length) >= self.config.block_size
        # more of a prompt is sorted together with what of it is still open
        if waits and (self.decoded or self.is_decoding(k.shape[2])):
            self.integrity.require_untorn()
            self.commit(defer, whole_prompt=True)
        if self.is_initialized and k.shape[:2] != (self.rows, self.heads):
            raise ValueError(
                f"layer {self.index}: the cache holds {self.rows} rows of {self.heads} heads; this pass brings "
                f"{k.shape[0]} of {k.shape[1]}. Use a new TurboCache, or reset() this one."
            )

    def append(
        self, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, buckets: torch.Tensor | None = None, defer: bool = False
    ) -> None:
        """Quantize new tokens into the open buffer. k, v: [B, Hkv, M, D], aligned by `chunk`, as are their buckets.

        defer: what kernels note of NaN and Inf is left to be read (`unchecked`), for all layers at once.
        """
        self.check(k, defer)
        if not self.is_initialized:
            # the first column of the longest row: what lies before it is padding of all
            first = min(chunk.starts or [0])
            self.lazy_initialization(k[:, :, first:], v[:, :, first:])
        # what can be refused is, before anything is written
        ready = None if self.step is not None or self.appends_in_place() else self._quantized(k, v, chunk)
        self.integrity.turn(self.index, self.seen)
        self._append(k, v, chunk, buckets, defer, ready)
        if self.step is not None:
            # its launch has sealed what was full
            self.integrity.settle(self.index)

    @ordinary
    def _quantized(self, k: torch.Tensor, v: torch.Tensor, chunk: Chunk) -> Quantized:
        """What `OpenBuffer.take` stores."""
        k = rotate_keys(k, self.config.backend) if self.config.rotates else k
        # the contents of padding are arbitrary, and must not affect a scale
        return self.buffer.quantized(chunk.blank(k), chunk.blank(v), self.index, self.config.backend)

    @storing
    def _append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk: Chunk,
        buckets: torch.Tensor | None,
        defer: bool,
        ready: Quantized | None,
    ) -> None:
        decoding = self.is_decoding(chunk.tokens)
        if self.decoded and not decoding:
            # a new turn: what it sorts can be taken back as a whole
            self.turn_start = self.lengths()
        self.decoded = decoding
        how: dict[str, Any] = {
            "nonfinite": self.nonfinite,
            "rotate": self.config.rotates,
            "backend": self.config.backend,
        }
        if self.step is not None:
            noted, arrived = self.bucket_index.noted(buckets), self.step.arrived
            append_step(k, v, self.store(), given_scale=self.universal, noted=noted, arrived=arrived, **how)
            return
        self.bucket_index.append(buckets, self.lengths(), chunk.tokens, chunk.starts)
        # tokens of a prompt on their own scales, whose range is noted; later ones on the scale of that range
        given_scale, max_scale = (self.universal, None) if decoding else (None, self.universal)
        if ready is None:
            self.buffer.reserve(chunk.tokens, chunk.starts)
            append_tokens(
                k, v, self.store(), starts=chunk.begin(self.device), given_scale=given_scale, max_scale=max_scale, **how
            )
            self.buffer.count(chunk.tokens, chunk.starts)
        else:
            self.buffer.take(ready, chunk.starts, given_scale, max_scale, self.config.backend)
        self._count_columns(chunk)
        if not decoding and ready is None:
            self._check_finite(defer)

    def appends_in_place(self) -> bool:
        """Whether a kernel stores new tokens."""
        return uses_triton(self.config.backend, self.device, self.obstacle)

    def _check_finite(self, defer: bool) -> None:
        """ValueError if kernels have noted NaN or Inf; defer: left to `TurboCache.require_finite`."""
        self.unchecked = True
        if not defer:
            require_finite({self.index: self.nonfinite})
            self.unchecked = False

    def _count_columns(self, chunk: Chunk) -> None:
        if chunk.valid is not None:
            valid = self.valid
            if valid is None:
                valid = torch.ones(self.rows, self.seen, dtype=torch.bool, device=self.device)
            self.valid_prefix = torch.cat((valid, chunk.valid.to(self.device)), 1)
        self.seen += chunk.tokens

    def commit(self, defer: bool = False, whole_prompt: bool = False) -> None:
        """Seal every whole block of open tokens, and drop what has left the window. Waits while `record_past`.

        Of a prompt that is put in order, the newest tokens stay open as long as more of it may come (`whole_prompt`).
        """
        if not self.record_past and self.step is None:
            self._commit(defer, whole_prompt)
        self.integrity.settle(self.index)

    @storing
    def _commit(self, defer: bool = False, whole_prompt: bool = False) -> None:
        block, pool, buffer = self.config.block_size, self.pool, self.buffer
        index, lengths, whole = self.bucket_index, self.lengths(), [length // block for length in buffer.length]
        to_sort = index.sortable(pool.sealed, lengths, self.turn_start)
        if index.sorts and not (whole_prompt or self.decoded):
            whole = [max(0, end - n) for end, n in zip(index.outside(lengths), pool.sealed, strict=True)]
        leaving = self.leaving()
        if not any(whole) and not any(leaving):
            return
        # a block is final: NaN or Inf noted for its tokens must be reported
        self._check_finite(defer)
        self._rank_heads([row for row, n in enumerate(whole) if n and not self.ranked[row]])
        from_pages = [min(n, sealed) for n, sealed in zip(leaving, pool.sealed, strict=True)]
        unsealed = [min(n - old, w) for n, old, w in zip(leaving, from_pages, whole, strict=True)]
        if any(from_pages):
            pool.drop_front(from_pages)
        to_seal = [w - n for w, n in zip(whole, unsealed, strict=True)]
        if any(to_seal):
            done = pool.sealed
            pool.append(to_seal)
            for row, blocks in enumerate(to_sort):
                if blocks:
                    buffer.reorder(row, (blocks.start - done[row]) * block, index.sort(row, blocks))
            # the op seals all that is whole of so many open tokens
            store = self.store()
            if index.sorts:
                store = store._replace(open_len=shared([n * block for n in whole], self.device))
            seal_open(store, max(whole), backend=self.config.backend)
        if any(whole):
            buffer.drop_front([n * block for n in whole])
        left = zip(self.dropped, from_pages, unsealed, strict=True)
        self.dropped = [before + (old + new) * block for before, old, new in left]

    def leaving(self) -> list[int]:
        """Whole blocks of each row that no later query of a sliding layer will see."""
        if self.window is None:
            return [0] * self.rows
        return [max(0, length - (self.window - 1)) // self.config.block_size for length in self.lengths()]

    def _rank_heads(self, rows: list[int]) -> None:
        """Rank the heads of rows that seal their first block. One block decides, however the prompt was cut."""
        if not rows:
            return
        if len(rows) == self.rows:
            self.order = self.buffer.ranked_heads(slice(None), self.config)
        else:
            where = shared(rows, self.device)
            self.order = self.order.index_copy(0, where, self.buffer.ranked_heads(where, self.config))
        for row in rows:
            self.ranked[row] = True

    # --- what Transformers calls -------------------------------------------------------------------------------

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """If claimed by the attention hook: pass the new tokens on, as the attention function will store them.

        Otherwise store them, and return full-precision keys and values of every column: always correct, but slower.
        """
        if self.claimed:
            self.claimed, self.pending = False, (key_states, value_states)
            return key_states, value_states
        self.integrity.require_unclaimed()
        return self.update_dense(key_states, value_states, self.given_mask)

    def update_dense(
        self, k: torch.Tensor, v: torch.Tensor, given_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens; return dense keys and values [B, Hkv, columns, D], 0 at padding (mask as in TurboCache)."""
        tokens = k.shape[2]
        chunk = chunk_from_given_mask(given_mask, self.seen, k)
        columns = self.get_mask_sizes(tokens)[0]
        decoding = self.is_decoding(tokens)
        past = (k[:, :, :0], v[:, :, :0]) if decoding or not self.seen else self.dense(columns - tokens)
        self.append(chunk.align(k), chunk.align(v), chunk)
        dense = self.dense(columns) if decoding else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
        self.commit()
        return dense

    def dense(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest `columns` columns, dequantized: [B, Hkv, columns, D], 0 at padding."""
        self.integrity.require_untorn()
        first = self.seen - min(columns, self.seen)
        k, v = dequantize(self.store(), self.dtype, self.config.rotates)
        token = torch.arange(first, self.seen, device=self.device).expand(self.rows, -1)
        valid = torch.ones_like(token, dtype=torch.bool)
        if self.valid is not None:
            valid = self.valid[:, first:]
            token = (self.valid.cumsum(-1) - 1)[:, first:]
        token = token - shared(self.dropped, self.device)[:, None]
        valid = (valid & (token >= 0))[:, None, :, None]
        pick = token.clamp(min=0)[:, None, :, None]
        k, v = (torch.take_along_dim(x, pick, 2).masked_fill(~valid, 0.0) for x in (k, v))
        return k, v

    def removable(self, tokens_to_remove: int) -> list[int]:
        """How many tokens of each row `crop(tokens_to_remove)` would remove; [] if it holds no tokens.

        Raises:
            ValueError: a positive number, more columns than there are, or tokens that stay or go together with others:
                those behind what a sliding window has dropped, and those in the order of their buckets.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number; got {tokens_to_remove}.")
        if not (self.is_initialized and tokens_to_remove):
            return []
        call = f"layer {self.index}: crop({tokens_to_remove})"
        if -tokens_to_remove > self.seen:
            raise ValueError(
                f"crop({tokens_to_remove}): the cache holds only {self.seen} columns. Remove at most so many, or "
                "reset()."
            )
        counts = [-tokens_to_remove] * self.rows
        if self.valid is not None:
            counts = self.valid[:, self.seen + tokens_to_remove :].sum(-1).tolist()
        for row, (count, held) in enumerate(zip(counts, self.lengths(), strict=True)):
            if held - count < min(held + self.dropped[row] - count, (self.window or 1) - 1):
                raise ValueError(
                    f"{call} needs tokens that have left the sliding window of {self.window}. Call "
                    "activate_past_recording() before the pass to be rolled back."
                )
            self.bucket_index.require(row, held - count, call)
        return counts

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` columns (0 or negative, see `removable`), then seal what waited."""
        # assisted decoding in transformers 5.17 passes a tensor, which must not become part of `seen`
        tokens_to_remove = int(tokens_to_remove)
        counts = self.removable(tokens_to_remove)
        if counts:
            self._remove(-tokens_to_remove, counts)
        if self.is_initialized:
            self._commit()

    @storing
    def _remove(self, columns: int, counts: list[int]) -> None:
        left = [held - count for held, count in zip(self.lengths(), counts, strict=True)]
        self.bucket_index.cut(left)
        self.turn_start = [min(old, new) for old, new in zip(self.turn_start, left, strict=True)]
        self.seen -= columns
        self.valid_prefix = None if self.valid_prefix is None else self.valid_prefix[:, : self.seen].clone()
        self.given_mask = None if self.given_mask is None else self.given_mask[:, : self.seen]
        reopened = [max(0, count - held) for count, held in zip(counts, self.buffer.length, strict=True)]
        self.buffer.drop_back([min(count, held) for count, held in zip(counts, self.buffer.length, strict=True)])
        if any(reopened):
            # what is left of a cut block goes to the buffer
            tokens, starts = self.pool.reopen(reopened, self.order)
            for row, sealed in enumerate(self.pool.sealed):
                if not sealed and not self.dropped[row]:
                    self.ranked[row] = self.preranked
            if tokens.k.shape[2]:
                self.buffer.append(tokens, starts)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i continues what row `beam_idx[i]` was (`rows.chosen_rows`). Sealed pages are shared, not copied."""
        if self.is_initialized:
            self._select_rows(chosen_rows(beam_idx, self.rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, side by side."""
        if self.is_initialized:
            self._select_rows(repeated_rows(repeats, self.rows))

    batch_select_indices = reorder_cache

    @storing
    def _select_rows(self, index: torch.Tensor) -> None:
        rows, on_device = index.tolist(), index.to(self.device)
        self.pool.select_rows(rows)
        self.buffer.select_rows(index)
        self.bucket_index.select_rows(index)
        self.order = self.order[on_device]
        self.ranked = [self.ranked[row] for row in rows]
        self.dropped, self.turn_start = [self.dropped[row] for row in rows], [self.turn_start[row] for row in rows]
        self.valid_prefix = None if self.valid_prefix is None else self.valid_prefix[on_device]
        self.universal = None if self.universal is None else self.universal[on_device]
        self.given_mask = None if self.given_mask is None else self.given_mask[index.to(self.given_mask.device)]
        self.rows = len(rows)

    def full_precision_bytes(self) -> int:
        """Bytes that the tokens currently held would take in the model's dtype."""
        if not self.is_initialized:
            return 0
        return 2 * self.heads * self.dim * self.dtype.itemsize * sum(self.lengths())

    def nbytes(self) -> dict[str, int]:
        """Allocated bytes by kind: sealed codes, their metadata (scales, steps, table), open tokens."""
        if not self.is_initialized:
            return {"codes": 0, "scales": 0, "open": 0}
        codes, scales = self.pool.nbytes()
        explain = (self.order, self.valid_prefix, self.universal, self.nonfinite)
        # and the open tokens of each row, int64
        scales += sum(x.nbytes for x in explain if x is not None) + 8 * self.rows
        index = {"index": self.bucket_index.nbytes()} if self.bucket_index.tables else {}
        return {"codes": codes, "scales": scales, "open": self.buffer.nbytes(), **index}
