"""Rows of a batch: what the host counts for each, and the device's copies of it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from turbo_hf.cache.guards import once, ordinary
from turbo_hf.ops.host_device import send, shared


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

    def open_after(self, tokens: int, starts: Sequence[int] | None) -> list[int]:
        """`open` with `tokens` new tokens per row, row r's from column `starts[r]` on."""
        if starts is None:
            return [held + tokens for held in self.open]
        return [held + tokens - start for held, start in zip(self.open, starts, strict=True)]

    @once
    def stored(self, tokens: int, starts: Sequence[int] | None, decoding: bool) -> "RowState":
        """The state after `tokens` new columns, row r's tokens from column `starts[r]` on. decoding: in a step."""
        return self._replace(
            seen=self.seen + tokens,
            open=self.open_after(tokens, starts),
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
