"""One layer of the compressed cache, as Transformers calls it."""

import copy
import operator
from typing import Any, NoReturn

import torch

from turbo_hf.cache.dequantized import DequantizedLayer
from turbo_hf.cache.index_keys import store_index_keys
from turbo_hf.cache.pass_mark import ordinary, storing, untraced
from turbo_hf.cache.row_selection import chosen_rows, repeated_rows
from turbo_hf.errors import Unsupported
from turbo_hf.layout import rotary_part
from turbo_hf.ops.checks import check_float
from turbo_hf.ops.host_device import shared


class TurboLayer(DequantizedLayer):
    """Keys and values of one attention layer: sealed pages and an open INT8 buffer, with one length per row.

    Padding is not stored: each row begins at its first real token, so its blocks and scales are the same alone and in
    any batch. `seen` counts columns, including padding, because that is what Transformers asks for.

    Args:
        config: widths, block size.
        window: how many tokens a query sees, including itself; None: all. Older whole blocks are dropped.
        index: the layer's number, for messages.
        head_order: KV heads from the one that needs its bits most to the one that needs them least; None: as they are
            numbered.
        selector: decode steps read the keys that it chooses; None: all keys.
        balance: float32 [Hkv, D], what keys are divided by before they are rounded, and queries multiplied by; None: by
            nothing. Not of latents.
        latent: of latent attention: `keys` are latents [B, 1, columns, rank], `values` the rotary parts.
    """

    is_croppable = True

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens, and return full-precision keys and values of every column: always correct, but slower.

        The attention modules of a patched model do not come here (`ClaimedCache.update`).

        Raises:
            ValueError: no float tensors [B, Hkv, M, D], or others than the cache holds.
        """
        check_float(f"layer {self.index}: key_states", key_states)
        stored = rotary_part(value_states)
        check_float(f"layer {self.index}: value_states", stored)
        keys, values = self.append_and_dequantize(key_states, stored, self.given_mask)
        return keys, values[..., : value_states.shape[-1]]

    @untraced
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the index keys [B, M, D] of the columns that `update` has stored last; returns those of all columns.

        Raises:
            ValueError: no indexer serves this layer.
        """
        if not self.latent:
            raise ValueError(f"layer {self.index} keeps no index keys: its attention reads all tokens.")
        return store_index_keys(self, indexer_key_states, self.seen - indexer_key_states.shape[1])

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

    @property
    def record_past(self) -> bool:
        """Whether `crop` may bring back what a pass would seal or drop, as Transformers' own layers call it."""
        return self.state.recording

    def activate_past_recording(self) -> None:
        """Wait for `crop` after each pass before sealing a block or leaving a window (assisted decoding)."""
        self.state = self.state._replace(recording=True)

    def stop_recording(self) -> None:
        """End the recording, and seal blocks that were kept open for a `crop`."""
        self.state = self.state._replace(recording=False)
        if self.is_initialized:
            self.commit()

    def reset(self) -> None:
        """Drop every token and release the memory; the layer can then take another batch."""
        empty = type(self)(
            self.config, self.window, self.index, self.head_order, self.selector, self.latent, self.balance
        )
        empty.mark, empty.empty = self.mark, self.empty
        # in one assignment, so that an exception leaves nothing half reset
        self.__dict__ = vars(empty)

    # --- crop --------------------------------------------------------------------------------------------------

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
        valid = self.valid
        if valid is not None:
            counts = valid[:, self.seen + tokens_to_remove :].sum(-1).tolist()
        for row, (count, held) in enumerate(zip(counts, self.lengths(), strict=True)):
            if held - count < min(held + self.state.dropped[row] - count, (self.window or 1) - 1):
                raise ValueError(
                    f"{call} needs tokens that have left the sliding window of {self.window}. Call "
                    "activate_past_recording() before the pass to be rolled back."
                )
            self.bucket_index.require(row, held - count, call)
        return counts

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` columns (0 or negative, see `removable`), then seal whole blocks."""
        # assisted decoding in transformers 5.17 passes a tensor, which must not become part of `seen`
        tokens_to_remove = int(tokens_to_remove)
        counts = self.removable(tokens_to_remove)
        if counts:
            self._remove(-tokens_to_remove, counts)
        if self.is_initialized:
            self._commit()

    @storing
    def _remove(self, columns: int, counts: list[int]) -> None:
        before = self.state
        after = before.cropped(columns, counts)
        self.bucket_index.cut(after.lengths())
        self.valid_prefix = None if self.valid_prefix is None else self.valid_prefix[:, : after.seen].clone()
        self.given_mask = None if self.given_mask is None else self.given_mask[:, : after.seen]
        rows = zip(counts, before.open, before.sealed, strict=True)
        # sealed blocks before the first tokens
        reopened = [min(max(0, n - held + before.first), sealed * before.block) for n, held, sealed in rows]
        if any(reopened):
            # the rest of a cut block goes back to the open buffer
            tokens, back = self.pool.reopen(before.sealed, reopened, self.order)
            self.buffer.append(tokens, back, list(map(operator.sub, after.open, back)))
        self.state = after

    # --- rows of the batch -------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i continues what row `beam_idx[i]` was (`chosen_rows`). Sealed pages are shared, not copied."""
        if self.is_initialized:
            self.select_rows(chosen_rows(beam_idx, self.rows).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, side by side."""
        if self.is_initialized:
            self.select_rows(repeated_rows(repeats, self.rows).tolist())

    batch_select_indices = reorder_cache

    @storing
    def select_rows(self, rows: list[int]) -> None:
        """As `reorder_cache`, of rows that exist."""
        index = shared(rows, self.device)
        self.pool.follow(self.pool.table.select_rows(self.state.sealed, rows))
        self.buffer.select_rows(index)
        self.bucket_index.select_rows(rows, index)
        if self.index_keys is not None:
            self.index_keys.select_rows(index)
        self.order = self.order[index]
        self.valid_prefix = None if self.valid_prefix is None else self.valid_prefix[index]
        self.given_mask = None if self.given_mask is None else self.given_mask[index.to(self.given_mask.device)]
        self.state = self.state.selected(rows)

    # --- memory and copies -------------------------------------------------------------------------------------

    def full_precision_bytes(self) -> int:
        """Bytes that the tokens currently held here would take in the model's dtype."""
        if not self.is_initialized:
            return 0
        channels = self.dim + (self.dim if self.rotary_dim is None else self.rotary_dim)
        if self.index_keys is not None:
            channels += self.index_keys.channels
        tokens = self.config.expert.block_size * sum(self.state.sealed) + sum(self.state.open)
        return self.heads * channels * self.dtype.itemsize * tokens

    def nbytes(self) -> dict[str, int]:
        """Allocated bytes by kind: sealed codes, their metadata (sizes, zeros, spans, table), open tokens, index."""
        if not self.is_initialized:
            return {"codes": 0, "scales": 0, "open": 0}
        codes, scales = self.pool.nbytes()
        explain = (self.order, self.valid_prefix, self.nonfinite)
        # and the open tokens of each row, int64
        scales += sum(x.nbytes for x in explain if x is not None) + 8 * self.rows
        index = {"index": self.bucket_index.nbytes()} if self.bucket_index.bucketed else {}
        if self.index_keys is not None:
            index = {"index": self.index_keys.kept.nbytes}
        return {"codes": codes, "scales": scales, "open": self.buffer.nbytes(), **index}

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
    copied = memo[id(thing)] = object.__new__(type(thing))
    copied.__dict__.update(copy.deepcopy(thing.__dict__, memo))
    return copied


def refuse_offloading() -> NoReturn:
    """Raises: Unsupported."""
    raise Unsupported(
        "a TurboCache is not offloaded: attention reads it where it was stored. For less memory take fewer bits, or "
        'use Transformers\' own cache (cache_implementation="offloaded"), which is not compressed.'
    )
