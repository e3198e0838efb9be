"""Rows of a batch: their columns in a pass, what the host counts for each, and the device's copies of it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from turbo_hf.cache.pass_mark import once, ordinary
from turbo_hf.ops.host_device import send, shared

DIFFERS = (
    "attention_mask (none means all ones) differs from the one under which the cached tokens were stored. "
    "Padding is not cached, so it cannot change later: keep the mask of earlier columns, or start a new cache."
)


class NewQKV(NamedTuple):
    """The new tokens of one call: query [B, Hq, M, D]; key, value [B, Hkv, M, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class NewColumns(NamedTuple):
    """The new columns of one forward pass, [B, M].

    valid: bool [B, M] on the device, or None when every column of every row is a token.
    starts: for each row, the column at which its tokens begin once they stand at the end; None with `valid`.
    gather: int64 [B, M], the column that each aligned place takes; None when rows are aligned already (left padding).
    """

    tokens: int
    valid: torch.Tensor | None = None
    starts: list[int] | None = None
    gather: torch.Tensor | None = None

    def on(self, device: torch.device) -> "NewColumns":
        """The same columns for layers on `device`."""
        if self.valid is None or self.valid.device == device:
            return self
        gather = None if self.gather is None else self.gather.to(device)
        return self._replace(valid=self.valid.to(device), gather=gather)

    def starts_on(self, device: torch.device) -> torch.Tensor | None:
        """`starts` as int64 [B] on `device`, read-only."""
        return None if self.starts is None else shared(self.starts, device)

    def blank(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, H, M, D], aligned, with 0 before each row's tokens."""
        first = self.starts_on(x.device)
        if first is None:
            return x
        hidden = torch.arange(self.tokens, device=x.device) < first[:, None]
        return x.masked_fill(hidden[:, None, :, None], 0.0)

    def align(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, H, M, D] with each row's tokens at its end."""
        return x if self.gather is None else torch.take_along_dim(x, self.gather[:, None, :, None], 2)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `align`."""
        if self.gather is None:
            return x
        return torch.take_along_dim(x, self.gather.argsort(-1)[:, None, :, None], 2)


def columns_of(valid: torch.Tensor, same: torch.Tensor | None = None) -> NewColumns:
    """The columns of a mask bool [B, M]; one read from the device. same: bool [], whether the past is unchanged."""
    tokens = valid.shape[1]
    counts = valid.sum(-1)
    aligned = torch.arange(tokens, device=valid.device) >= (tokens - counts)[:, None]
    moved = (aligned != valid).any()
    stats = torch.cat((counts, torch.stack((moved, torch.ones_like(moved) if same is None else same)))).tolist()
    if not stats.pop():
        raise ValueError(DIFFERS)
    starts = [tokens - count for count in stats[:-1]]
    if not any(starts):
        return NewColumns(tokens)
    # a stable sort moves the padding before the tokens and keeps the order of both
    gather = valid.to(torch.uint8).argsort(dim=-1, stable=True) if stats[-1] else None
    return NewColumns(tokens, valid, starts, gather)


def columns_from_mask(mask: torch.Tensor | None, seen: int, tokens: int, valid: torch.Tensor | None) -> NewColumns:
    """The columns that a model's 2D attention mask describes.

    Args:
        mask: [B, seen + tokens], nonzero at real tokens; None: at all of them.
        seen: columns of earlier passes. tokens: columns of this one.
        valid: bool [B, seen], which of the earlier columns the cache stored; None: all.

    Raises:
        ValueError: another width, or a mask that hides or shows a token of an earlier pass which it did not before.
    """
    if mask is None:
        if valid is not None and not bool(valid.all()):
            raise ValueError(DIFFERS)
        return NewColumns(tokens)
    if mask.shape[1] != seen + tokens:
        raise ValueError(
            f"attention_mask has {mask.shape[1]} columns; the cache holds {seen} and this pass brings {tokens}. "
            "Pass a mask over all of them, [batch, cached + new], or none."
        )
    if seen and valid is None and bool(mask.all()):
        # nearly every step: two operations in place of a dozen. A padded prompt would read twice
        return NewColumns(tokens)
    past = mask[:, :seen].bool()
    same = past.all() if valid is None else (past == valid.to(mask.device)).all()
    return columns_of(mask[:, seen:].bool(), same)


class Planned(NamedTuple):
    """How the `tokens` columns after `seen` earlier ones are aligned under a mask."""

    mask: torch.Tensor | None
    seen: int
    tokens: int
    new: NewColumns

    def under(self, mask: torch.Tensor | None) -> bool:
        """Whether a layer was given the same mask; over several GPUs, each layer gets a copy."""
        if self.mask is None or mask is None or self.mask.device == mask.device:
            return self.mask is mask
        return self.mask.shape == mask.shape


class RowState(NamedTuple):
    """What the host counts for each row of a layer, without asking the device.

    Immutable, lists included: a layer whose tokens change gets a new `RowState`, in one assignment. Layers of one block
    size and window that have seen the same passes have equal states, and may share one.

    block: tokens per block.
    sealed: sealed blocks per row.
    open: open tokens per row, which follow the sealed blocks.
    dropped: tokens per row that have left the sliding window.
    turn_start: tokens that each row held before its newest prompt, which `crop` can remove as a whole.
    seen: columns of all passes, padding included.
    decoded: whether the newest tokens came in a decode step.
    recording: whether blocks stay open, and tokens in the window, until a `crop` (assisted decoding).
    recent: newest tokens of each row that stay open (`TurboConfig.recent_tokens`).
    first: first tokens of each row that stay open (`KVStore.first`), before all others.
    """

    block: int
    sealed: list[int]
    open: list[int]
    dropped: list[int]
    turn_start: list[int]
    seen: int = 0
    decoded: bool = False
    recording: bool = False
    recent: int = 0
    first: int = 0

    def with_rows(self, rows: int) -> "RowState":
        """The state of `rows` rows without tokens."""
        return self._replace(sealed=[0] * rows, open=[0] * rows, dropped=[0] * rows, turn_start=[0] * rows)

    def lengths(self) -> list[int]:
        """Tokens held by each row (older ones may have left a sliding window)."""
        return [blocks * self.block + tokens for blocks, tokens in zip(self.sealed, self.open, strict=True)]

    def leaving(self, window: int | None, kept: int = 0) -> list[int]:
        """Whole blocks of each row that no later query of a layer with this window will see.

        kept: how many of the newest tokens may still be taken back.
        """
        if window is None:
            return [0] * len(self.open)
        return [max(0, length - kept - (window - 1)) // self.block for length in self.lengths()]

    def waits(self) -> bool:
        """Whether a first prompt, and nothing else, waits for a `crop`."""
        return self.recording and not (self.decoded or any(self.sealed))

    @once
    def stored(self, tokens: int, starts: Sequence[int] | None, decoding: bool) -> "RowState":
        """The state after `tokens` new columns, row r's tokens from column `starts[r]` on. decoding: in a step."""
        return self._replace(
            seen=self.seen + tokens,
            open=[held + tokens - start for held, start in zip(self.open, starts or [0] * len(self.open), strict=True)],
            # a new turn begins: `crop` can remove its tokens as a whole, sorted or not
            turn_start=self.lengths() if self.decoded and not decoding else self.turn_start,
            decoded=decoding,
        )

    def whole(self, kept: int = 0) -> list[int]:
        """Whole blocks of open tokens of each row, but for those of the first tokens and the newest `recent + kept`."""
        return [max(0, tokens - self.staying - kept) // self.block for tokens in self.open]

    @property
    def staying(self) -> int:
        """Open tokens of a row that no block takes."""
        return self.first + self.recent

    def is_due(self) -> bool:
        """Whether some row has a whole block to be sealed."""
        return max(self.open) >= self.block + self.staying

    def with_sealed(self) -> "RowState":
        """The state once all whole blocks are sealed."""
        if not self.is_due():
            return self
        whole = self.whole()
        sealed = [held + count for held, count in zip(self.sealed, whole, strict=True)]
        opened = [held - count * self.block for held, count in zip(self.open, whole, strict=True)]
        return self._replace(sealed=sealed, open=opened)

    def without_front(self, blocks: Sequence[int]) -> "RowState":
        """The state without the oldest `blocks[row]` sealed blocks, which have left the window."""
        sealed = [held - count for held, count in zip(self.sealed, blocks, strict=True)]
        dropped = [held + count * self.block for held, count in zip(self.dropped, blocks, strict=True)]
        return self._replace(sealed=sealed, dropped=dropped)

    def cropped(self, columns: int, counts: Sequence[int]) -> "RowState":
        """Without the newest `columns` columns, `counts[row]` of them tokens. The rest of a cut block is open."""
        left = [held - count for held, count in zip(self.lengths(), counts, strict=True)]
        whole = [max(0, tokens - self.first) // self.block for tokens in left]
        sealed = list(map(min, self.sealed, whole))
        return self._replace(
            seen=self.seen - columns,
            sealed=sealed,
            open=[tokens - blocks * self.block for tokens, blocks in zip(left, sealed, strict=True)],
            turn_start=[min(old, new) for old, new in zip(self.turn_start, left, strict=True)],
        )

    def selected(self, rows: Sequence[int]) -> "RowState":
        """Row i becomes what row `rows[i]` was."""
        lists = (self.sealed, self.open, self.dropped, self.turn_start)
        sealed, opened, dropped, turn_start = ([numbers[row] for row in rows] for numbers in lists)
        return self._replace(sealed=sealed, open=opened, dropped=dropped, turn_start=turn_start)


class DeviceCounts:
    """The device's copies of `RowState.sealed` and `RowState.open`, int64 [B] each, of one layer.

    A list that has been replaced is sent again. Kernels count in these tensors too: `counted` records that they did.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # each tensor with the list that it equals
        self._sealed: tuple[list[int] | None, torch.Tensor | None] = (None, None)
        self._open: tuple[list[int] | None, torch.Tensor | None] = (None, None)

    def sealed(self, state: RowState) -> torch.Tensor:
        """Read-only unless `keep` was called: layers may share it."""
        known, tensor = self._sealed
        if tensor is None or known is not state.sealed:
            tensor = shared(state.sealed, self._device)
            self._sealed = state.sealed, tensor
        return tensor

    def open(self, state: RowState) -> torch.Tensor:
        """Of this layer alone; steady decoding does not send it again."""
        known, tensor = self._open
        if tensor is None or known is not state.open:
            tensor = self._written(state.open)
            self._open = state.open, tensor
        return tensor

    def keep(self, state: RowState, sealed: torch.Tensor, opened: torch.Tensor) -> None:
        """Use these tensors, which hold the state, from now on: replayed kernels count in them, at this address."""
        self._sealed, self._open = (state.sealed, sealed), (state.open, opened)

    @ordinary
    def _written(self, numbers: list[int]) -> torch.Tensor:
        """A tensor that kernels may write to, also outside `torch.inference_mode`."""
        return send(numbers, self._device)

    def counted(self, before: RowState, after: RowState) -> None:
        """Record that kernels have changed these tensors from `before` to `after`."""
        if self._sealed[0] is before.sealed:
            self._sealed = after.sealed, self._sealed[1]
        if self._open[0] is before.open:
            self._open = after.open, self._open[1]
