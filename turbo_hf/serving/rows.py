"""The requests of a pass as rows of the ops: what the host knows of them, in tensors that all layers read."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.layout import HeadGroups, open_token_bytes, page_bytes, power_of_two
from turbo_hf.ops.host_device import shared


class Shape(NamedTuple):
    """What is stored, alike in every layer.

    layers: number of layers.
    groups: (width, KV heads) of each width, as in `TurboConfig.head_groups`.
    dim: channels per head.
    block: tokens per block.
    """

    layers: int
    groups: HeadGroups
    dim: int
    block: int

    @property
    def heads(self) -> int:
        """KV heads of a layer."""
        return sum(heads for _, heads in self.groups)

    @property
    def page(self) -> int:
        """Bytes of one page: one block of one layer."""
        return sum(heads * page_bytes(self.dim, width, self.block) for width, heads in self.groups)

    @property
    def room(self) -> int:
        """Tokens of a slot: a block less one, and a step of several tokens."""
        return self.block + DECODE_TOKENS

    @property
    def slot(self) -> int:
        """Bytes of one slot: the open tokens of one request in all layers."""
        return self.layers * self.heads * self.room * open_token_bytes(self.dim)


SHORT = 1024
"""Prompts, and chunks of prompts, up to this length are computed together."""

MOST_ROWS, LEAST, MOST = 8, 128, 1024
"""Of a `Layout`: prompts, columns of each, and columns of all of them. On fewer tokens a pass spends as long."""

TOGETHER = 1 << 16
"""Maximum number of tokens that they hold and bring, all as long as the longest: what is unpacked at a time."""


class Row(NamedTuple):
    """One request in a pass.

    request: its id.
    past: tokens that it holds.
    new: tokens that the pass brings.
    first: the first of them in the pass.
    slot: where its open tokens are.
    blocks: its blocks, those included that this pass seals.
    """

    request: str
    past: int
    new: int
    first: int
    slot: int
    blocks: list[int]

    @property
    def is_step(self) -> bool:
        """Whether its tokens are stored before attention reads them, as in `LayerStorage.is_decoding`."""
        return self.past > 0 and self.new <= DECODE_TOKENS

    def columns(self, count: int) -> Any:
        """int64 [count] in NumPy: its tokens in the pass, aligned at their end; before them the first one again."""
        return self.first + np.arange(self.new - count, self.new).clip(0)


class StepRows:
    """Requests of a pass that bring equally many tokens, as rows of the ops: row s is the request in slot s, so that
    open tokens are read and written where they are. A slot without such a request is a row without a token.

    What all layers share is in tensors that `fill` writes again for each pass: a capture may read them.

    Args:
        size: rows.
        blocks: columns of the table.
        new: tokens of each request.
        shape: of the storage.
        device: where the tensors are.
        plans: as in `KVStore`.

    Attributes:
        table: int64 [size, blocks], the blocks of each row.
        sealed, after: int64 [size], its sealed blocks before the pass, and after it.
        starts: int64 [size], 0, or `new` in a row without a token.
        token: int64 [size], the first token of each row in the pass; 0 where there is none.
        slot: int64 [size], the slots of the requests in the order of the pass, then zeros.
        open_len: int64 [layers, size], open tokens; each layer's kernels count in their own.
        rows: the requests.
        sealed_host: the numbers in `sealed`.
    """

    def __init__(
        self, size: int, blocks: int, new: int, shape: Shape, device: torch.device, plans: dict[Any, Any] | None = None
    ):
        self.size, self.blocks, self.new, self.shape, self.plans = size, blocks, new, shape, plans
        self._sizes = [size * blocks, size, size, size, size, size, size * shape.layers]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        table, self.sealed, self.after, self.starts, self.token, self.slot, opened = self._flat.split(self._sizes)
        self.table, self.open_len = table.view(size, blocks), opened.view(shape.layers, size)
        self.arrived = torch.zeros(size, dtype=torch.int32, device=device)
        self.rows: list[Row] = []
        self.sealed_host: tuple[int, ...] = ()

    def fill(self, rows: list[Row]) -> None:
        """Begin a pass of these requests. Waits for nothing."""
        block, self.rows = self.shape.block, rows
        # torch's allocator of pinned memory knows when the copy is done
        flat = torch.zeros(len(self._flat), dtype=torch.int64, pin_memory=self._flat.is_cuda)
        table, sealed, after, starts, token, slot, opened = (x.numpy() for x in flat.split(self._sizes))
        starts[:] = self.new
        for n, row in enumerate(rows):
            at = row.slot
            table[at * self.blocks : at * self.blocks + len(row.blocks)] = row.blocks
            sealed[at], after[at] = row.past // block, (row.past + row.new) // block
            starts[at], token[at], slot[n] = 0, row.first, at
            opened[at :: self.size] = row.past % block
        self._flat.copy_(flat, non_blocking=True)
        self.sealed_host = tuple(sealed.tolist())
        for plan in (self.plans or {}).values():
            plan.update(self.sealed_host)

    @property
    def sealing(self) -> list[Row]:
        """The requests that get a sealed block."""
        return [row for row in self.rows if row.past % self.shape.block + row.new >= self.shape.block]

    @property
    def first_blocks(self) -> list[Row]:
        """Those of them whose first block it is."""
        return [row for row in self.sealing if row.past < self.shape.block]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows' tokens of x [1, H, T, D], as [size, H, new, D]; any token in a row without one."""
        rows: torch.Tensor = x[0].index_select(1, self.tokens).unflatten(1, (self.size, self.new)).transpose(0, 1)
        return rows

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """x [size, H, new, D] to the rows' tokens of out [1, H, T, D]."""
        slots = self.slot[: len(self.rows)]
        tokens = self.tokens.view(self.size, self.new).index_select(0, slots).flatten()
        out[0].index_copy_(1, tokens, x.index_select(0, slots).transpose(0, 1).flatten(1, 2))

    @cached_property
    def tokens(self) -> torch.Tensor:
        """int64 [size * new], the tokens of each row in the pass. Of rows that are filled once."""
        tokens: torch.Tensor = (self.token[:, None] + torch.arange(self.new, device=self.token.device)).flatten()
        return tokens


class Prompts:
    """Requests of a pass that bring prompts, or chunks of such, as rows of the ops: aligned at their ends.

    Either all of them hold tokens, or none. As in `StepRows`, `fill` writes again what changes from pass to pass.

    Args:
        count: rows. Those behind the requests are without a token.
        new: columns.
        blocks: columns of the table.
        past: whether the requests hold tokens.
        shape: of the storage.
        device: where the tensors are.
        spare: a slot of no request, for the rows without a token.

    Attributes:
        held, whole: maximum number of open tokens of a row before the pass, and of blocks that it seals.
        padded: whether a row may have fewer tokens than columns.
        table, sealed, after, open_len: as in `StepRows`.
        slots: int64 [count].
        starts: int64 [count], the first column that is a token.
        rest: int64 [count * block], among old and new open tokens those behind the last whole block.
        rows: the requests.
    """

    def __init__(
        self, count: int, new: int, blocks: int, past: bool, shape: Shape, device: torch.device, spare: int = 0
    ):
        self.count, self.new, self.blocks, self.past, self.shape, self.spare = count, new, blocks, past, shape, spare
        self.held = (shape.block - 1) * past
        self.whole, self.padded = (self.held + new) // shape.block, True
        self._sizes = [count * blocks, count, count, count, count, count * shape.block, count * shape.layers]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        table, self.slots, self.sealed, self.after, self.starts, self.rest, opened = self._flat.split(self._sizes)
        self.table, self.open_len = table.view(count, blocks), opened.view(shape.layers, count)
        self.arrived = torch.zeros(count, dtype=torch.int32, device=device)
        self.rows: list[Row] = []

    def fill(self, rows: list[Row]) -> None:
        """Begin a pass of these requests. Waits for nothing."""
        block, self.rows = self.shape.block, rows
        flat = torch.zeros(len(self._flat), dtype=torch.int64, pin_memory=self._flat.is_cuda)
        table, slots, sealed, after, starts, rest, opened = (x.numpy() for x in flat.split(self._sizes))
        slots[:], starts[:] = self.spare, self.new
        for n, row in enumerate(rows):
            table[n * self.blocks : n * self.blocks + len(row.blocks)] = row.blocks
            slots[n], sealed[n], after[n] = row.slot, row.past // block, (row.past + row.new) // block
            starts[n] = self.new - row.new
            rest[n * block : (n + 1) * block] = np.arange(block) + (after[n] - sealed[n]) * block
            opened[n :: self.count] = row.past % block
        self._flat.copy_(flat, non_blocking=True)

    @classmethod
    def of(cls, rows: list[Row], shape: Shape, device: torch.device) -> "Prompts":
        """Of these requests alone, whose tokens lie one after the other in the pass: for `take` and `put`."""
        block, new = shape.block, max(row.new for row in rows)
        padded = rows[0].past > 0 or any(row.new < new for row in rows)
        if padded:
            new = _multiple(new)
        made = cls(len(rows), new, _multiple(max(len(row.blocks) for row in rows)), rows[0].past > 0, shape, device)
        made.fill(rows)
        made.held = max(row.past % block for row in rows)
        made.whole = max((row.past % block + row.new) // block for row in rows)
        made.padded = padded
        if len(rows) > 1 or padded:
            made.tokens = shared(torch.from_numpy(np.concatenate([row.columns(new) for row in rows])), device)
            real = np.concatenate([np.arange(new) >= new - row.new for row in rows]).nonzero()[0]
            made.real = shared(torch.from_numpy(real), device) if made.padded else None
        return made

    tokens: torch.Tensor
    real: torch.Tensor | None

    @property
    def first_blocks(self) -> list[int]:
        """The rows whose first block is sealed."""
        block = self.shape.block
        return [n for n, row in enumerate(self.rows) if row.past < block <= row.past + row.new]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows' tokens of x [1, H, T, D], as [B, H, new, D]."""
        if len(self.rows) == 1 and not self.padded:
            return x[:, :, self.rows[0].first : self.rows[0].first + self.new]
        rows: torch.Tensor = x[0].index_select(1, self.tokens).unflatten(1, (-1, self.new)).transpose(0, 1)
        return rows

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """x [B, H, new, D] to the rows' tokens of out [1, H, T, D]."""
        if len(self.rows) == 1 and not self.padded:
            out[:, :, self.rows[0].first : self.rows[0].first + self.new] = x
            return
        flat, tokens = x.transpose(0, 1).flatten(1, 2), self.tokens
        if self.real is not None:
            flat, tokens = flat.index_select(1, self.real), tokens.index_select(0, self.real)
        out[0].index_copy_(1, tokens, flat)


class Layout:
    """A pass whose shape does not depend on its requests, so that it can be captured: first a token for each slot, then
    the columns of prompts.

    Args:
        steps, prompts: what lies there; None: nothing. They are filled with the layout.
        device: where the tensors are.

    Attributes:
        tokens: of the pass, those included that stand for none.
        outputs: maximum number of requests that get a token.
        order: int64 [tokens], which token of the pass lies where.
        place: int64 [tokens], where each token of the pass lies.
    """

    def __init__(self, steps: StepRows | None, prompts: Prompts | None, device: torch.device):
        self.steps, self.prompts = steps, prompts
        self.size = 0 if steps is None else steps.size
        count, new = (0, 0) if prompts is None else (prompts.count, prompts.new)
        self.tokens, self.outputs = self.size + count * new, self.size + count
        self._both = torch.zeros(2, self.tokens, dtype=torch.int64, device=device)
        self.order, self.place = self._both

    def fill(self, rows: list[Row]) -> None:
        """Begin a pass of these requests. Waits for nothing."""
        both = torch.zeros(2, self.tokens, dtype=torch.int64, pin_memory=self._both.is_cuda)
        order, place = both.numpy()
        if self.steps is not None:
            self.steps.fill([row for row in rows if row.is_step])
            for row in self.steps.rows:
                order[row.slot], place[row.first] = row.first, row.slot
        if self.prompts is not None:
            new = self.prompts.new
            self.prompts.fill([row for row in rows if not row.is_step])
            for n, row in enumerate(self.prompts.rows):
                end = self.size + (n + 1) * new
                order[end - new : end] = row.columns(new)
                place[row.first : row.first + row.new] = np.arange(end - row.new, end)
        self._both.copy_(both, non_blocking=True)

    @property
    def ranks(self) -> bool:
        """Whether some request gets its first block, which may rank its heads."""
        return any(bool(rows.first_blocks) for rows in (self.steps, self.prompts) if rows is not None)

    def as_pass(self) -> "Pass":
        """What attention computes."""
        prompts = [] if self.prompts is None else [self.prompts]
        return Pass([] if self.steps is None else [self.steps], prompts, fixed=True)


class Pass(NamedTuple):
    """What attention computes in a pass.

    steps: requests that bring few tokens, by how many.
    prompts: the others, by what is computed together.
    fixed: whether the tokens lie as in `Layout`.
    """

    steps: list[StepRows]
    prompts: list[Prompts]
    fixed: bool = False


def _multiple(number: int) -> int:
    """The next multiple of 16: sizes that are none are launches that Triton compiles another time."""
    return max(16, -(-number // 16) * 16)


def most_blocks(rows: list[Row]) -> int:
    """Columns of a table of these rows: a power of two, which seldom changes."""
    return power_of_two(max(8, *(len(row.blocks) for row in rows)))


def mixed_pass(rows: list[Row], size: int, shape: Shape, device: torch.device) -> Pass:
    """A pass in which the tokens of each request lie one after the other. size: slots that are in use."""
    by_new: dict[int, list[Row]] = {}
    for row in rows:
        if row.is_step:
            by_new.setdefault(row.new, []).append(row)
    steps = []
    for new, alike in by_new.items():
        steps.append(StepRows(size, most_blocks(alike), new, shape, device))
        steps[-1].fill(alike)
    prompts = [Prompts.of(group, shape, device) for group in _together([row for row in rows if not row.is_step])]
    return Pass(steps, prompts)


def _together(rows: list[Row]) -> list[list[Row]]:
    """Short prompts of about the same length; each long one by itself."""
    groups: list[list[Row]] = []
    growing: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        like = power_of_two(row.new), row.past and power_of_two(row.past)
        group = growing.get(like, [])
        room = (len(group) + 1) * max(each.past + each.new for each in (*group, row)) <= TOGETHER
        if group and row.new <= SHORT and room:
            group.append(row)
        else:
            growing[like] = [row]
            groups.append(growing[like])
    return groups
