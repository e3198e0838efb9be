"""The requests of a pass as rows of the ops: what the host knows of them, in tensors that all layers read."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.layout import HeadGroups, open_token_bytes, page_bytes, power_of_two
from turbo_hf.ops.decode.stream_k import SteadyPlans
from turbo_hf.ops.host_device import shared

TOGETHER = 1 << 16
"""Maximum number of tokens that prompts computed together hold and bring, all as long as the longest: what is unpacked
at a time."""


class Shape(NamedTuple):
    """What is stored: as many KV heads of as many channels in every layer.

    groups: of each layer, (width, KV heads) of each width, as in `TurboConfig.head_groups`.
    dim: channels per head.
    block: tokens per block.
    rotary_dim: of latent attention, as in `layout.page_bytes`.
    expanded: of latent attention, channels of a token's keys and values in all heads.
    opened: the type of open tokens.
    together: tokens of pasts that are unpacked at a time, but for a longer past.
    first, recent: as in `KVStore`, of every layer.
    """

    groups: tuple[HeadGroups, ...]
    dim: int
    block: int
    rotary_dim: int | None = None
    expanded: int = 0
    opened: torch.dtype = torch.int8
    together: int = TOGETHER
    first: int = 0
    recent: int = 0

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.groups)

    @property
    def heads(self) -> int:
        """KV heads of a layer; one of latents."""
        return sum(heads for _, heads in self.groups[0])

    @property
    def pages(self) -> list[int]:
        """Bytes of one page of each layer."""
        rest = self.block, self.rotary_dim
        return [sum(heads * page_bytes(self.dim, width, *rest) for width, heads in groups) for groups in self.groups]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page of each layer."""
        return sum(self.pages)

    @property
    def room(self) -> int:
        """Tokens of a slot: the first and the recent ones, a block less one, and a step of several tokens."""
        return self.first + self.recent + self.block + DECODE_TOKENS

    def sealed(self, tokens: int) -> int:
        """Sealed blocks of a request of so many tokens, but for one that has begun with more of a stored prefix."""
        return max(0, tokens - self.first - self.recent) // self.block

    @property
    def slot(self) -> int:
        """Bytes of one slot: the open tokens of one request in all layers."""
        wide = self.opened != torch.int8
        token = open_token_bytes(self.dim, unquantized=wide, rotary_dim=self.rotary_dim)
        return self.layers * self.heads * self.room * token


SHORT = 1024
"""Prompts, and chunks of prompts, up to this length are computed together."""

MOST_ROWS, LEAST, MOST = 8, 128, 1024
"""Most prompts of a `Layout`, least columns of each (fewer tokens take as long), and most columns of all."""


class Row(NamedTuple):
    """One request in a pass.

    request: its id.
    past: tokens that it holds.
    sealed: sealed blocks among them.
    new: tokens that the pass brings.
    first: the first of them in the pass.
    slot: where its open tokens are.
    blocks: its blocks, those included that this pass seals.
    """

    request: str
    past: int
    sealed: int
    new: int
    first: int
    slot: int
    blocks: list[int]

    @property
    def seals(self) -> int:
        """Blocks that the pass seals."""
        return len(self.blocks) - self.sealed

    def opened(self, block: int) -> int:
        """Open tokens before the pass. block: tokens per block."""
        return self.past - self.sealed * block

    @property
    def is_step(self) -> bool:
        """Whether its tokens are stored before attention reads them, as in `LayerStorage.is_decoding`."""
        return self.past > 0 and self.new <= DECODE_TOKENS

    def columns(self, count: int) -> Any:
        """int64 [count] in NumPy: its tokens in the pass, aligned at their end; before them the first one again."""
        return self.first + np.arange(self.new - count, self.new).clip(0)


def _room(sizes: list[int]) -> int:
    """Numbers in all parts of `_cut`."""
    return sum(size + size % 2 for size in sizes)


def _cut(flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Parts of these sizes, int64, each at a multiple of 16 bytes: elsewhere Triton compiles launches another time."""
    ends = np.cumsum([size + size % 2 for size in sizes]).tolist()
    return [flat[end - size - size % 2 : end - size % 2] for size, end in zip(sizes, ends, strict=True)]


def gathered(x: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """These tokens of x [1, H, T, D], the same number for each of `count` rows, as [count, H, n, D]."""
    # models have tokens before heads in memory: then one token is one run of memory
    found: torch.Tensor = x[0].transpose(0, 1).index_select(0, tokens).unflatten(0, (count, -1)).transpose(1, 2)
    return found


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
        self._flat = torch.zeros(_room(self._sizes), dtype=torch.int64, device=device)
        table, self.sealed, self.after, self.starts, self.token, self.slot, opened = _cut(self._flat, self._sizes)
        self.table, self.open_len = table.view(size, blocks), opened.view(shape.layers, size)
        self.arrived = torch.zeros(size, dtype=torch.int32, device=device)
        self.rows: list[Row] = []
        self.sealed_host: tuple[int, ...] = ()

    def fill(self, rows: list[Row]) -> None:
        """Begin a pass of these requests. Waits for nothing."""
        self.rows = rows
        # torch's allocator of pinned memory knows when the copy is done
        flat = torch.zeros(len(self._flat), dtype=torch.int64, pin_memory=self._flat.is_cuda)
        table, sealed, after, starts, token, slot, opened = (x.numpy() for x in _cut(flat, self._sizes))
        starts[:] = self.new
        for n, row in enumerate(rows):
            at = row.slot
            table[at * self.blocks : at * self.blocks + len(row.blocks)] = row.blocks
            sealed[at], after[at] = row.sealed, len(row.blocks)
            opened[at :: self.size] = row.opened(self.shape.block)
            starts[at], token[at], slot[n] = 0, row.first, at
        self._flat.copy_(flat, non_blocking=True)
        self.sealed_host = tuple(sealed.tolist())
        for plan in (self.plans or {}).values():
            plan.update(self.sealed_host)

    @property
    def seals(self) -> bool:
        """Whether some request gets a sealed block."""
        return any(row.seals for row in self.rows)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows' tokens of x [1, H, T, D], as [size, H, new, D]; any token in a row without one."""
        return gathered(x, self.tokens, self.size)

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """x [size, H, new, D] to the rows' tokens of out [1, H, T, D]."""
        slots = self.slot[: len(self.rows)]
        out[0].index_copy_(1, self._own_tokens, x.index_select(0, slots).transpose(0, 1).flatten(1, 2))

    @cached_property
    def tokens(self) -> torch.Tensor:
        """int64 [size * new], the tokens of each row in the pass. Of rows that are filled once."""
        tokens: torch.Tensor = (self.token[:, None] + torch.arange(self.new, device=self.token.device)).flatten()
        return tokens

    @cached_property
    def _own_tokens(self) -> torch.Tensor:
        """The tokens of the requests, in the order of requests."""
        slots = self.slot[: len(self.rows)]
        return self.tokens.view(self.size, self.new).index_select(0, slots).flatten()


class Prompts:
    """Requests of a pass that bring prompts, or chunks of such, as rows of attention: aligned at their ends.

    Either all of them hold tokens, or none. As in `StepRows`, `fill` writes again what changes from pass to pass.

    Args:
        count: rows. Those behind the requests are without a token.
        new: columns.
        blocks: columns of the table.
        past: whether the requests hold tokens.
        device: where the tensors are.

    Attributes:
        padded: whether a row may have fewer tokens than columns.
        table: int64 [count, blocks], the blocks of each row.
        slots, sealed, open_len: int64 [count], before the pass.
        starts: int64 [count], the first column that is a token.
        rows: the requests.
    """

    def __init__(self, count: int, new: int, blocks: int, past: bool, device: torch.device):
        self.count, self.new, self.blocks, self.past, self.padded = count, new, blocks, past, True
        self._sizes = [count * blocks, count, count, count, count]
        self._flat = torch.zeros(_room(self._sizes), dtype=torch.int64, device=device)
        table, self.slots, self.sealed, self.open_len, self.starts = _cut(self._flat, self._sizes)
        self.table = table.view(count, blocks)
        self.rows: list[Row] = []

    def fill(self, rows: list[Row], shape: Shape) -> None:
        """Begin a pass of these requests. Waits for nothing."""
        self.rows = rows
        flat = torch.zeros(len(self._flat), dtype=torch.int64, pin_memory=self._flat.is_cuda)
        table, slots, sealed, opened, starts = (x.numpy() for x in _cut(flat, self._sizes))
        starts[:] = self.new
        for n, row in enumerate(rows):
            slots[n], sealed[n], starts[n] = row.slot, row.sealed, self.new - row.new
            opened[n] = row.opened(shape.block)
            table[n * self.blocks : n * self.blocks + len(row.blocks)] = row.blocks
        self._flat.copy_(flat, non_blocking=True)

    @classmethod
    def of(cls, rows: list[Row], shape: Shape, device: torch.device) -> "Prompts":
        """The prompts of these requests, whose tokens lie one after the other in the pass: for `take` and `put`."""
        new, past = max(row.new for row in rows), rows[0].past > 0
        padded = past or any(row.new < new for row in rows)
        new = _multiple(new) if padded else new
        made = cls(len(rows), new, _multiple(max(len(row.blocks) for row in rows)), past, device)
        made.fill(rows, shape)
        made.padded = padded
        if len(rows) > 1 or padded:
            tokens = np.concatenate([row.columns(new) for row in rows])
            real = np.concatenate([np.arange(new) >= new - row.new for row in rows]).nonzero()[0]
            sent = (shared(torch.from_numpy(x), device) for x in (tokens, real, tokens[real]))
            made.tokens, made.real, made.real_tokens = sent
        return made

    tokens: torch.Tensor
    real: torch.Tensor
    real_tokens: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows' tokens of x [1, H, T, D], as [B, H, new, D]."""
        if len(self.rows) == 1 and not self.padded:
            return x[:, :, self.rows[0].first : self.rows[0].first + self.new]
        return gathered(x, self.tokens, len(self.rows))

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """x [B, H, new, D] to the rows' tokens of out [1, H, T, D]."""
        if len(self.rows) == 1 and not self.padded:
            out[:, :, self.rows[0].first : self.rows[0].first + self.new] = x
            return
        flat = x.transpose(0, 1).flatten(1, 2)
        if self.padded:
            flat = flat.index_select(1, self.real)
        out[0].index_copy_(1, self.real_tokens, flat)


class Packed(NamedTuple):
    """Prompts of requests that hold no tokens, for attention in one launch over all tokens of a pass, without padding.

    What lies between them is computed like prompts, too, and then overwritten: so nothing is copied.

    rows: the requests.
    edges: int32 [prompts + 1], where each begins in the pass, and the end.
    longest: the most tokens of one.
    tokens: all tokens of the pass.
    """

    rows: list[Row]
    edges: torch.Tensor
    longest: int
    tokens: int

    @classmethod
    def of(cls, rows: list[Row], own: list[Row], device: torch.device) -> "Packed | None":
        """The requests `own` of a pass, packed; None: there are fewer than two."""
        if len(own) < 2:
            return None
        longest, tokens = max(row.new for row in own), rows[-1].first + rows[-1].new
        edges, at = [0], 0
        for row in own:
            edges += [*range(at + longest, row.first, longest), *[row.first] * (row.first > at)]
            at = row.first + row.new
            edges.append(at)
        edges += [*range(at + longest, tokens, longest), *[tokens] * (tokens > at)]
        return cls(own, shared(edges, device).to(torch.int32), longest, tokens)


class Blocks:
    """The new tokens of prompts as the blocks that they become, for storing them: a row of the ops is one block of one
    request. Its first ones begin with the open tokens that it held, and its last one may end early.

    A slot's tokens behind the first ones are `parts` blocks, of which the last are empty where it holds fewer.

    A request without all of its first tokens (`Shape.first`) has a row more in front, which begins with them.

    As in `StepRows`, `fill` writes again what changes from pass to pass.

    Args:
        count: rows; the last one is of no request.
        requests: how many.
        shape: of the storage.
        device: where the tensors are.
        spare: a slot of no request.

    Attributes:
        tokens: int64 [count * block], what lies at each place of each row, among the tokens of the pass.
        table: int64 [count, 1], its block, if it is whole.
        sealed: int64 [count], 1 if it is whole, else 0.
        open_len: int64 [layers, count], zeros.
        slots: int64 [requests], the slot of each request.
        begin, last, held: of each part of a slot int64 [requests], the row that begins with what it holds, the row
            that it holds after the pass, and how many tokens it holds.
        front, early: int64 [requests], its row in front, and how many first tokens it held. Requests without that row
            have the last row of all, and `front_slots` names no slot for them.
        seals: whether some row is whole.
    """

    def __init__(self, count: int, requests: int, shape: Shape, device: torch.device, spare: int):
        self.count, self.shape, self.spare = count, shape, spare
        self.seals = True
        block, self.parts = shape.block, 1 + shape.recent // shape.block
        self._sizes = [count * block, count, count, count * shape.layers, *[requests] * (4 + 3 * self.parts)]
        self._flat = torch.zeros(_room(self._sizes), dtype=torch.int64, device=device)
        parts = _cut(self._flat, self._sizes)
        self.tokens, table, self.sealed, opened, *each = parts
        self.slots, self.front_slots, self.front, self.early = each[:4]
        self.begin, self.last, self.held = each[4::3], each[5::3], each[6::3]
        self.table, self.open_len = table.view(count, 1), opened.view(shape.layers, count)
        self.arrived = torch.zeros(count, dtype=torch.int32, device=device)

    def fill(self, rows: list[Row], places: list[int]) -> None:
        """Begin a pass of these requests, whose tokens begin at `places`. Waits for nothing."""
        shape, block = self.shape, self.shape.block
        flat = torch.zeros(len(self._flat), dtype=torch.int64, pin_memory=self._flat.is_cuda)
        parts = (x.numpy() for x in _cut(flat, self._sizes))
        tokens, table, sealed, _, slots, front_slots, front, early, *each = parts
        begin, last, held = each[::3], each[1::3], each[2::3]
        slots[:], front_slots[:] = self.spare, self.spare
        for x in (front, *begin, *last):
            x[:] = self.count - 1
        at = 0
        for n, (row, place) in enumerate(zip(rows, places, strict=True)):
            if row.past < shape.first:
                tokens[at * block : (at + 1) * block] = place + (np.arange(block) - row.past).clip(0, row.new - 1)
                front_slots[n], front[n], early[n] = row.slot, at, row.past
                at += 1
            count, opened = behind_first(row, shape), row.opened(block) - shape.first
            if not count:
                continue
            # in front of it new ones may lie that are first tokens
            columns = np.arange(count * block) - opened
            tokens[at * block : (at + count) * block] = place + columns.clip(0, row.new - 1)
            table[at : at + row.seals], sealed[at : at + row.seals] = row.blocks[row.sealed :], 1
            slots[n] = row.slot
            for part in range(min(self.parts, count)):
                begin[part][n], held[part][n] = at + part, min(max(0, opened - part * block), block)
            for part in range(count - row.seals):
                last[part][n] = at + row.seals + part
            at += count
        self._flat.copy_(flat, non_blocking=True)

    @classmethod
    def of(cls, rows: list[Row], shape: Shape, device: torch.device, spare: int) -> "Blocks":
        """The blocks of these requests, whose tokens lie one after the other in the pass."""
        count = _multiple(1 + sum((row.past < shape.first) + behind_first(row, shape) for row in rows))
        made = cls(count, len(rows), shape, device, spare)
        made.fill(rows, [row.first for row in rows])
        made.seals = any(row.seals for row in rows)
        return made


def behind_first(row: Row, shape: Shape) -> int:
    """Blocks in which new tokens of this request lie, but for its first ones."""
    return -(-max(0, row.opened(shape.block) + row.new - shape.first) // shape.block)


class Layout:
    """A pass whose shape does not depend on its requests, so that it can be captured: first a token for each slot, then
    the columns of prompts.

    Args:
        steps, prompts: what lies there; None: nothing. They are filled with the layout.
        shape, device, spare: as in `Blocks`.

    Attributes:
        blocks: what prompts become; None: there are none.
        tokens: of the pass, those included that stand for none.
        outputs: maximum number of requests that get a token.
        order: int64 [tokens], which token of the pass lies where.
        place: int64 [tokens], where each token of the pass lies.
    """

    def __init__(self, steps: StepRows | None, prompts: Prompts | None, shape: Shape, device: torch.device, spare: int):
        self.steps, self.prompts, self.blocks = steps, prompts, None
        if prompts is not None:
            most = -(-(prompts.new + (shape.recent + shape.block - 1) * prompts.past) // shape.block)
            # an even number, so that the counts of each layer begin at a multiple of 16 bytes
            most += shape.first > 0
            self.blocks = Blocks((2 + prompts.count * most) // 2 * 2, prompts.count, shape, device, spare)
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
        if self.prompts is not None and self.blocks is not None:
            new, own = self.prompts.new, [row for row in rows if not row.is_step]
            self.prompts.fill(own, self.blocks.shape)
            ends = [self.size + (n + 1) * new for n in range(len(own))]
            for row, end in zip(own, ends, strict=True):
                order[end - new : end] = row.columns(new)
                place[row.first : row.first + row.new] = np.arange(end - row.new, end)
            self.blocks.fill(own, [end - row.new for row, end in zip(own, ends, strict=True)])
        self._both.copy_(both, non_blocking=True)

    def as_pass(self) -> "Pass":
        """What attention computes."""
        prompts = [] if self.prompts is None else [self.prompts]
        return Pass([] if self.steps is None else [self.steps], prompts, self.blocks, fixed=True)


class Pass(NamedTuple):
    """What attention computes in a pass.

    steps: requests that bring few tokens, by how many.
    prompts: the others, by what is computed together.
    blocks: how prompts are stored.
    packed: those of `prompts` whose attention may be computed at once; None: there are none.
    fixed: whether the tokens lie as in `Layout`.
    """

    steps: list[StepRows]
    prompts: list[Prompts]
    blocks: Blocks | None = None
    packed: Packed | None = None
    fixed: bool = False


def _multiple(number: int) -> int:
    """The next multiple of 16: sizes that are none are launches that Triton compiles another time."""
    return max(16, -(-number // 16) * 16)


def most_blocks(rows: list[Row]) -> int:
    """Columns of a table of these rows: a power of two, which seldom changes."""
    return power_of_two(max(8, *(len(row.blocks) for row in rows)))


def mixed_pass(rows: list[Row], size: int, shape: Shape, device: torch.device, spare: int) -> Pass:
    """A pass in which the tokens of each request lie one after the other. size: slots that are in use. spare: as in
    `Blocks`."""
    by_new: dict[int, list[Row]] = {}
    for row in rows:
        if row.is_step:
            by_new.setdefault(row.new, []).append(row)
    steps = []
    for new, alike in by_new.items():
        # also where nothing is captured: the launches are then those of captured passes, and compile once
        plans = SteadyPlans() if device.type == "cuda" else None
        steps.append(StepRows(size, most_blocks(alike), new, shape, device, plans))
        steps[-1].fill(alike)
    prompts = [row for row in rows if not row.is_step]
    if not prompts:
        return Pass(steps, [])
    groups = [Prompts.of(group, shape, device) for group in _together(prompts, shape.together)]
    packed = Packed.of(rows, [row for row in prompts if not row.past and row.new <= SHORT], device)
    return Pass(steps, groups, Blocks.of(prompts, shape, device, spare), packed)


def _together(rows: list[Row], most: int) -> list[list[Row]]:
    """Short prompts of about the same length; each long one by itself. most: as `Shape.together`."""
    groups: list[list[Row]] = []
    growing: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        like = power_of_two(row.new), row.past and power_of_two(row.past)
        group = growing.get(like, [])
        room = (len(group) + 1) * max(each.past + each.new for each in (*group, row)) <= most
        if group and row.new <= SHORT and room:
            group.append(row)
        else:
            growing[like] = [row]
            groups.append(growing[like])
    return groups
