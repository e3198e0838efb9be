"""Keys and values of all requests: sealed pages in the pool that Transformers plans, open tokens in slots beside it.

The pool's blocks hold one page for each layer; the bytes of a page are those of `turbo_hf.layout`, but all keys of all
pages come first, then all values, and so on, layer by layer, so that the ops see ordinary `PagedHeads`: the page of
block n of each layer has the number n. A slot holds the open tokens of one request in every layer.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from turbo_hf.attention.prompt import prompt_attention
from turbo_hf.cache.new_columns import NewQKV
from turbo_hf.cache.open_buffer import Tokens, ranked_heads
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.layout import (
    HeadGroups,
    KVStore,
    PagedHeads,
    Scoring,
    Width,
    code_type,
    meta_lines,
    open_token_bytes,
    packed_bytes,
    page_bytes,
    power_of_two,
    widths_of,
)
from turbo_hf.ops.decode.contract import decode
from turbo_hf.ops.host_device import send, shared
from turbo_hf.ops.store.append import append_tokens, seal_open
from turbo_hf.ops.store.rotate import rotate_queries


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
        own = x[0].index_select(1, self._tokens(self.token))
        rows: torch.Tensor = own.unflatten(1, (self.size, self.new)).transpose(0, 1)
        return rows

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """x [size, H, new, D] to the rows' tokens of out [1, H, T, D]."""
        slots = self.slot[: len(self.rows)]
        tokens = self._tokens(self.token.index_select(0, slots))
        out[0].index_copy_(1, tokens, x.index_select(0, slots).transpose(0, 1).flatten(1, 2))

    def _tokens(self, first: torch.Tensor) -> torch.Tensor:
        return (first[:, None] + torch.arange(self.new, device=first.device)).flatten()


class Prompts:
    """Prompts of a pass, or chunks of such, that are computed together, aligned at their ends. What all layers share.

    Either all of them have a past, or none.
    """

    def __init__(self, rows: list[Row], shape: Shape, device: torch.device):
        self.rows, self.new, block = rows, max(row.new for row in rows), shape.block
        self.past = rows[0].past > 0
        self.sealed, self.opened = [row.past // block for row in rows], [row.past % block for row in rows]
        self.whole = [(row.past % block + row.new) // block for row in rows]
        most = max(len(row.blocks) for row in rows)
        flat = [block for row in rows for block in (*row.blocks, *[0] * (most - len(row.blocks)))]
        self.table, self.slots = shared(flat, device).view(len(rows), most), shared([row.slot for row in rows], device)
        self.sealed_device = shared(self.sealed, device)
        self.after = shared([n + whole for n, whole in zip(self.sealed, self.whole, strict=True)], device)
        # each layer's kernels count in their own
        self.open_len = send(self.opened * shape.layers, device).view(shape.layers, len(rows))
        begin = [self.new - row.new for row in rows]
        self.starts = shared(begin, device) if any(begin) else None
        # what is behind the blocks that are sealed
        rest = [[n * block + i for i in range(block)] for n in self.whole]
        self.rest = shared([n for each in rest for n in each], device)
        if len(rows) > 1:
            # the tokens of the pass, where padding repeats a row's first one; and those of them that are no padding
            columns = [row.first + np.arange(row.new - self.new, row.new).clip(0) for row in rows]
            self.tokens = shared(torch.from_numpy(np.concatenate(columns)), device)
            real = np.concatenate([np.arange(self.new) >= start for start in begin]).nonzero()[0]
            self.real = shared(torch.from_numpy(real), device) if any(begin) else None

    @property
    def first_blocks(self) -> list[int]:
        """The rows whose first block is sealed."""
        return [n for n, row in enumerate(self.rows) if self.whole[n] and not self.sealed[n]]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows' tokens of x [1, H, T, D], as [B, H, new, D]."""
        if len(self.rows) == 1:
            return x[:, :, self.rows[0].first : self.rows[0].first + self.new]
        rows: torch.Tensor = x[0].index_select(1, self.tokens).unflatten(1, (-1, self.new)).transpose(0, 1)
        return rows

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """x [B, H, new, D] to the rows' tokens of out [1, H, T, D]."""
        if len(self.rows) == 1:
            out[:, :, self.rows[0].first : self.rows[0].first + self.new] = x
            return
        flat, tokens = x.transpose(0, 1).flatten(1, 2), self.tokens
        if self.real is not None:
            flat, tokens = flat.index_select(1, self.real), tokens.index_select(0, self.real)
        out[0].index_copy_(1, tokens, flat)


class Pass(NamedTuple):
    """What attention computes in a pass.

    steps: requests that bring few tokens, by how many.
    prompts: the others, by what is computed together.
    in_slots: whether the tokens of the pass are those of `steps[0]`, one for each slot.
    """

    steps: list[StepRows]
    prompts: list[Prompts]
    in_slots: bool = False


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
    prompts = [Prompts(group, shape, device) for group in _together([row for row in rows if not row.is_step])]
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


class Storage:
    """The tensors, and what a pass does with them, layer by layer.

    pool: uint8, the bytes of all blocks.
    slots: how many requests may have open tokens at once.
    orders: for each layer, KV heads by their need of bits, where a calibration decides; None: each request's first
        block does.
    """

    def __init__(
        self,
        shape: Shape,
        config: TurboConfig,
        pool: torch.Tensor,
        slots: int,
        orders: list[tuple[int, ...] | None],
    ):
        self.shape, self.config, self.device = shape, config, pool.device
        self.blocks = pool.numel() // shape.page // shape.layers
        self.paged = _carve(pool, self.blocks * shape.layers, shape)
        # of each layer
        self._paged = [
            tuple(
                PagedHeads(pages.bits, *(x.unflatten(0, (-1, self.blocks))[n] for x in pages[1:]))
                for pages in self.paged
            )
            for n in range(shape.layers)
        ]
        layers, heads, dim, room = shape.layers, shape.heads, shape.dim, shape.room
        self.k_open = torch.empty(layers, slots, heads, room, dim, dtype=torch.int8, device=self.device)
        self.v_open = torch.empty(layers, slots, heads, dim, room, dtype=torch.int8, device=self.device)
        self.k_scale, self.v_scale = torch.empty(2, layers, slots, heads, room, device=self.device)
        self.nonfinite = torch.zeros(layers, dtype=torch.int32, device=self.device)
        plain = torch.arange(heads, device=self.device)
        given = [plain if order is None else torch.tensor(order, device=self.device) for order in orders]
        # of each row
        self._given = torch.stack(given)[:, None].repeat(1, slots, 1)
        # whether each request's first block ranks its heads; the order then belongs to that block
        self.ranks = [len(shape.groups) > 1 and order is None for order in orders]
        self._order_of_block = plain.repeat(layers, self.blocks if any(self.ranks) else 0, 1)

    def attend(self, now: Pass, layer: int, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """Store the new tokens of one layer, [1, H, T, D], and attend: [1, Hq, T, D]."""
        heads, dim = self.shape.heads, self.shape.dim
        if qkv.key.shape != qkv.value.shape or (qkv.key.shape[1], qkv.key.shape[3]) != (heads, dim):
            raise Unsupported(
                f"layer {layer}: the pool has pages for {heads} KV heads of {dim} channels, and this layer brings keys "
                f"{list(qkv.key.shape)} and values {list(qkv.value.shape)}. Use generate, or remove the patch."
            )
        if now.in_slots:
            own = NewQKV(*(x[0].transpose(0, 1).unsqueeze(2) for x in qkv))
            return self._steps(now.steps[0], layer, own, scoring, window).squeeze(2).transpose(0, 1)[None]
        # zeros for tokens that only fill a pass up
        out = torch.zeros_like(qkv.query)
        for rows in now.steps:
            own = NewQKV(*(rows.take(x) for x in qkv))
            rows.put(out, self._steps(rows, layer, own, scoring, window))
        for prompts in now.prompts:
            own = NewQKV(*(prompts.take(x) for x in qkv))
            prompts.put(out, self._prompts(prompts, layer, own, scoring, window))
        return out

    def _order(self, layer: int, table: torch.Tensor) -> torch.Tensor:
        """int64 [B, Hkv]: the head in each slot of each row."""
        if self.ranks[layer] and table.shape[1]:
            return self._order_of_block[layer].index_select(0, table[:, 0])
        return self._given[layer, : len(table)]

    def _opened(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The slots: k, v, k_scale and v_scale of all layers."""
        return self.k_open, self.v_open, self.k_scale, self.v_scale

    def _steps(self, rows: StepRows, layer: int, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """The new tokens join the open ones, then attention reads them; blocks that have become whole are sealed.

        The tensors of `rows` alone determine what it does where nobody's first block ranks its heads, so that it can be
        replayed.
        """
        config = self.config
        k, v, k_scale, v_scale = (x[layer, : rows.size] for x in self._opened())
        store = KVStore(
            self._paged[layer],
            self._order(layer, rows.table),
            rows.table,
            rows.sealed,
            k,
            v,
            k_scale,
            v_scale,
            rows.open_len[layer],
            self.shape.block,
            rows.sealed_host,
            rows.plans,
        )
        self._append(qkv, store, layer, rows.starts, rows.arrived)
        out = decode(
            rotate_queries(qkv.query, config.backend) if config.rotates else qkv.query,
            store,
            scoring,
            starts=rows.starts,
            window=window,
            mode=config.decode_attention,
            backend=config.backend,
        ).out
        store = store._replace(sealed=rows.after, sealed_host=None)
        self._seal(store, [row.slot for row in rows.first_blocks], 1, layer)
        if rows.new > 1:
            self._move_rests(rows, layer)
        return out

    def _move_rests(self, rows: StepRows, layer: int) -> None:
        """Behind a block that was sealed, tokens begin anew."""
        block = self.shape.block
        for row in rows.sealing:
            behind = slice(block, row.past % block + row.new)
            to = slice(0, behind.stop - block)
            k, v, k_scale, v_scale = (x[layer, row.slot] for x in self._opened())
            for x in (k.transpose(1, 2), v, k_scale, v_scale):
                x[..., to] = x[..., behind]

    def _prompts(self, prompts: Prompts, layer: int, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """Prompts, or chunks of such: attention reads the tokens as they come, then they are stored."""
        count, held, block = len(prompts.rows), max(prompts.opened), self.shape.block
        slots = [x[layer] for x in self._opened()]
        k, v, k_scale, v_scale = (x.index_select(0, prompts.slots) for x in slots)
        store = KVStore(
            self._paged[layer],
            self._order(layer, prompts.table),
            prompts.table,
            prompts.sealed_device,
            k,
            v,
            k_scale,
            v_scale,
            prompts.open_len[layer],
            block,
            tuple(prompts.sealed),
        )
        past = store if prompts.past else None
        out = prompt_attention(self.config, qkv, past, prompts.starts, window, scoring)
        # also what is behind the last whole block
        room = -(-max(held + prompts.new, (max(prompts.whole) + 1) * block) // 16) * 16
        heads, dim = self.shape.heads, self.shape.dim
        k = torch.empty(count, heads, room, dim, dtype=torch.int8, device=self.device)
        v = torch.empty(count, heads, dim, room, dtype=torch.int8, device=self.device)
        k_scale, v_scale = torch.empty(2, count, heads, room, device=self.device)
        if held:
            for x, y in zip(
                _tokens_last(k, v, k_scale, v_scale),
                _tokens_last(store.k_open, store.v_open, store.k_scale, store.v_scale),
                strict=True,
            ):
                x[..., :held] = y[..., :held]
        store = store._replace(k_open=k, v_open=v, k_scale=k_scale, v_scale=v_scale)
        self._append(qkv, store, layer, prompts.starts)
        if any(prompts.whole):
            store = store._replace(sealed=prompts.after, sealed_host=None)
            self._seal(store, prompts.first_blocks, max(prompts.whole), layer)
        for x, y in zip(_tokens_last(k, v, k_scale, v_scale), _tokens_last(*slots), strict=True):
            place = prompts.rest.view(count, *[1] * (x.dim() - 2), block).expand(*x.shape[:-1], block)
            y[..., :block].index_copy_(0, prompts.slots, x.gather(-1, place))
        return out

    def _append(
        self,
        qkv: NewQKV,
        store: KVStore,
        layer: int,
        starts: torch.Tensor | None = None,
        arrived: torch.Tensor | None = None,
    ) -> None:
        config = self.config
        append_tokens(
            qkv.key,
            qkv.value,
            store,
            starts=starts,
            nonfinite=self.nonfinite[layer : layer + 1],
            arrived=arrived,
            rotate=config.rotates,
            backend=config.backend,
        )

    def _seal(self, store: KVStore, new: list[int], blocks: int, layer: int) -> None:
        """Seal the whole blocks of open tokens; rows whose first block is among them (`new`) rank their heads."""
        if self.ranks[layer] and new:
            at = shared(new, self.device)
            k, v = store.k_open[at, :, : self.shape.block], store.v_open[at, :, :, : self.shape.block].mT
            k_scale, v_scale = (x[at, :, : self.shape.block] for x in (store.k_scale, store.v_scale))
            order = ranked_heads(Tokens(k, k_scale, v, v_scale), self.config)
            store = store._replace(order=store.order.index_copy(0, at, order))
            self._order_of_block[layer].index_copy_(0, store.table[at, 0], order)
        seal_open(store, blocks, backend=self.config.backend)

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Blocks `target` become copies of blocks `source`, in all layers."""
        old, new = shared(source, self.device), shared(target, self.device)
        for pages in self.paged:
            for x in pages[1:]:
                of_layers = x.unflatten(0, (-1, self.blocks))
                of_layers.index_copy_(1, new, of_layers.index_select(1, old))
        if self._order_of_block.numel():
            self._order_of_block.index_copy_(1, new, self._order_of_block.index_select(1, old))

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        """Slots `target` become copies of slots `source`."""
        old, new = shared(source, self.device), shared(target, self.device)
        for x in self._opened():
            x.index_copy_(1, new, x.index_select(1, old))


def _tokens_last(
    k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Open tokens, whose last dimension is then that of tokens."""
    return k.transpose(2, 3), v, k_scale, v_scale


def _carve(pool: torch.Tensor, pages: int, shape: Shape) -> tuple[PagedHeads, ...]:
    """`PagedHeads` for `pages` pages in the bytes of `pool`."""
    dim, block, at = shape.dim, shape.block, 0
    parts: dict[tuple[Width, str], torch.Tensor] = {}
    # numbers of four bytes last, behind multiples of 16 bytes
    for name in ("k", "v", "meta", "scale"):
        for width, slots in shape.groups:
            bits, value_bits = widths_of(width)
            size, dtype = {
                "k": ((slots, block, packed_bytes(dim, bits)), code_type(bits)),
                "v": ((slots, dim, packed_bytes(block, value_bits)), code_type(value_bits)),
                "meta": ((slots, meta_lines(bits, value_bits), dim), torch.int8),
                "scale": ((slots, 2), torch.float32),
            }[name]
            end = at + pages * torch.Size(size).numel() * dtype.itemsize
            parts[width, name] = pool[at:end].view(dtype).view(pages, *size)
            at = end
    return tuple(
        PagedHeads(widths_of(width)[0], *(parts[width, name] for name in ("k", "v", "meta", "scale")))
        for width, _ in shape.groups
    )
