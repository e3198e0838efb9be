"""Keys and values of all requests: sealed pages in the pool that Transformers plans, open tokens in slots beside it.

The pool's blocks hold one page for each layer; the bytes of a page are those of `turbo_hf.layout`, but all keys of all
pages come first, then all values, and so on, so that the ops see ordinary `PagedHeads`. Layer i's page of block n has
the number `n * layers + i`. A slot holds the open tokens of one request in every layer.
"""

from typing import NamedTuple

import torch

from turbo_hf.attention.turbo_attention import NewQKV, prompt_attention
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


class Group:
    """Rows of a pass that are computed together: steps of equally many tokens, or one prompt. What all layers share."""

    def __init__(self, rows: list[Row], shape: Shape, device: torch.device):
        self.rows, self.new, block = rows, rows[0].new, shape.block
        self.past = max(row.past for row in rows)
        self.sealed = [row.past // block for row in rows]
        self.opened = [row.past % block for row in rows]
        self.whole = [(held + self.new) // block for held in self.opened]
        self.slots = shared([row.slot for row in rows], device)
        # tokens of the pass; a slice where they lie side by side
        side_by_side = all(row.first == rows[0].first + n * self.new for n, row in enumerate(rows))
        self.first = rows[0].first if side_by_side else None
        self.tokens = None
        if not side_by_side:
            index = [row.first + n for row in rows for n in range(self.new)]
            self.tokens = shared(index, device)
        most = max(len(row.blocks) for row in rows)
        flat = [block for row in rows for block in (*row.blocks, *[0] * (most - len(row.blocks)))]
        blocks = shared(flat, device).view(len(rows), most)
        self.tables = blocks * shape.layers + torch.arange(shape.layers, device=device)[:, None, None]
        self.sealed_device = shared(self.sealed, device)
        # each layer's kernels count in their own
        self.open_device = send(self.opened * shape.layers, device).view(shape.layers, len(rows))
        self.row = torch.arange(len(rows), device=device)[:, None]
        # of the new tokens, among the open ones
        self.place = shared(self.opened, device)[:, None] + torch.arange(self.new, device=device)
        self.sealing = [n for n, count in enumerate(self.whole) if count]
        self.sealing_device = shared(self.sealing, device) if self.sealing else None
        self.after = shared([n + count for n, count in zip(self.sealed, self.whole, strict=True)], device)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows' tokens of x [1, H, T, D], as [B, H, new, D]."""
        if self.tokens is None:
            assert self.first is not None
            own = x[0, :, self.first : self.first + len(self.rows) * self.new]
        else:
            own = x[0].index_select(1, self.tokens)
        rows: torch.Tensor = own.unflatten(1, (len(self.rows), self.new)).transpose(0, 1)
        return rows

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """x [B, H, new, D] to the rows' tokens of out [1, H, T, D]."""
        flat = x.transpose(0, 1).flatten(1, 2)
        if self.tokens is None:
            assert self.first is not None
            out[0, :, self.first : self.first + flat.shape[1]] = flat
        else:
            out[0].index_copy_(1, self.tokens, flat)


def groups_of(rows: list[Row], shape: Shape, device: torch.device) -> list[Group]:
    """Steps by their number of tokens, and each prompt by itself."""
    steps: dict[int, list[Row]] = {}
    for row in rows:
        if row.is_step:
            steps.setdefault(row.new, []).append(row)
    prompts = [[row] for row in rows if not row.is_step]
    return [Group(group, shape, device) for group in (*steps.values(), *prompts)]


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
        self.pages = pool.numel() // shape.page
        self.paged = _carve(pool, self.pages, shape)
        layers, heads, dim, room = shape.layers, shape.heads, shape.dim, shape.room
        self.k_open = torch.empty(layers, slots, heads, room, dim, dtype=torch.int8, device=self.device)
        self.v_open = torch.empty(layers, slots, heads, dim, room, dtype=torch.int8, device=self.device)
        self.k_scale, self.v_scale = torch.empty(2, layers, slots, heads, room, device=self.device)
        self.nonfinite = torch.zeros(layers, dtype=torch.int32, device=self.device)
        plain = torch.arange(heads, device=self.device)
        self._given = [plain if order is None else torch.tensor(order, device=self.device) for order in orders]
        # whether each request's first block ranks its heads; the order then belongs to the page of that block
        self.ranks = [len(shape.groups) > 1 and order is None for order in orders]
        self._order_of_page = plain.repeat(self.pages if any(self.ranks) else 0, 1)

    def attend(
        self, groups: list[Group], layer: int, qkv: NewQKV, scoring: Scoring, window: int | None
    ) -> torch.Tensor:
        """Store the new tokens of one layer, [1, H, T, D], and attend: [1, Hq, T, D]."""
        heads, dim = self.shape.heads, self.shape.dim
        if qkv.key.shape != qkv.value.shape or (qkv.key.shape[1], qkv.key.shape[3]) != (heads, dim):
            raise Unsupported(
                f"layer {layer}: the pool has pages for {heads} KV heads of {dim} channels, and this layer brings keys "
                f"{list(qkv.key.shape)} and values {list(qkv.value.shape)}. Use generate, or remove the patch."
            )
        out = torch.empty_like(qkv.query)
        for group in groups:
            own = NewQKV(*(group.take(x) for x in qkv))
            attend = self._steps if group.rows[0].is_step else self._prompt
            group.put(out, attend(group, layer, own, scoring, window))
        return out

    def _order(self, group: Group, layer: int, table: torch.Tensor) -> torch.Tensor:
        """int64 [B, Hkv]: the head in each slot of each row."""
        if self.ranks[layer] and table.shape[1]:
            return self._order_of_page.index_select(0, table[:, 0])
        return self._given[layer].expand(len(group.rows), -1)

    def _store(self, group: Group, layer: int) -> KVStore:
        """The rows' cache before the pass. The open tokens are a copy."""
        table = group.tables[layer]
        k, v, k_scale, v_scale = (x[layer].index_select(0, group.slots) for x in self._opened())
        return KVStore(
            self.paged,
            self._order(group, layer, table),
            table,
            group.sealed_device,
            k,
            v,
            k_scale,
            v_scale,
            group.open_device[layer],
            self.shape.block,
            tuple(group.sealed),
        )

    def _opened(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The slots: k, v, k_scale and v_scale of all layers."""
        return self.k_open, self.v_open, self.k_scale, self.v_scale

    def _steps(self, group: Group, layer: int, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """The new tokens join the open ones, then attention reads them; blocks that have become whole are sealed."""
        config, store = self.config, self._store(group, layer)
        self._append(qkv, store, layer)
        out = decode(
            rotate_queries(qkv.query, config.backend) if config.rotates else qkv.query,
            store,
            scoring,
            window=window,
            mode=config.decode_attention,
            backend=config.backend,
        ).out
        if group.sealing_device is not None:
            at = group.sealing_device
            due = store._replace(
                order=store.order.index_select(0, at),
                table=store.table.index_select(0, at),
                sealed=group.after.index_select(0, at),
                k_open=store.k_open.index_select(0, at),
                v_open=store.v_open.index_select(0, at),
                k_scale=store.k_scale.index_select(0, at),
                v_scale=store.v_scale.index_select(0, at),
                open_len=store.open_len.index_select(0, at),
                sealed_host=None,
            )
            self._seal(due, [group.sealed[n] for n in group.sealing], 1, layer)
        # to the slots: behind a block that was sealed, tokens begin anew
        row, place, slot = group.row, group.place, group.slots[:, None]
        to = place % self.shape.block
        self.k_open[layer][slot, :, to] = store.k_open[row, :, place]
        self.v_open[layer][slot, :, :, to] = store.v_open[row, :, :, place]
        self.k_scale[layer][slot, :, to] = store.k_scale[row, :, place]
        self.v_scale[layer][slot, :, to] = store.v_scale[row, :, place]
        return out

    def _prompt(self, group: Group, layer: int, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """One prompt, or a chunk of one: attention reads the tokens as they come, then they are stored."""
        store, (held,), (whole,), slot = self._store(group, layer), group.opened, group.whole, group.rows[0].slot
        out = prompt_attention(self.config, qkv, store if group.past else None, None, window, scoring)
        room = -(-(held + group.new) // 16) * 16
        heads, dim = self.shape.heads, self.shape.dim
        k = torch.empty(1, heads, room, dim, dtype=torch.int8, device=self.device)
        v = torch.empty(1, heads, dim, room, dtype=torch.int8, device=self.device)
        k_scale, v_scale = torch.empty(2, 1, heads, room, device=self.device)
        if held:
            k[:, :, :held], v[..., :held] = store.k_open[:, :, :held], store.v_open[..., :held]
            k_scale[..., :held], v_scale[..., :held] = store.k_scale[..., :held], store.v_scale[..., :held]
        store = store._replace(k_open=k, v_open=v, k_scale=k_scale, v_scale=v_scale)
        self._append(qkv, store, layer)
        if whole:
            self._seal(store._replace(sealed=group.after, sealed_host=None), group.sealed, whole, layer)
        rest = slice(whole * self.shape.block, held + group.new)
        to = slice(0, rest.stop - rest.start)
        self.k_open[layer, slot, :, to] = k[0, :, rest]
        self.v_open[layer, slot, :, :, to] = v[0, :, :, rest]
        self.k_scale[layer, slot, :, to] = k_scale[0, :, rest]
        self.v_scale[layer, slot, :, to] = v_scale[0, :, rest]
        return out

    def _append(self, qkv: NewQKV, store: KVStore, layer: int) -> None:
        config = self.config
        flag = self.nonfinite[layer : layer + 1]
        append_tokens(qkv.key, qkv.value, store, nonfinite=flag, rotate=config.rotates, backend=config.backend)

    def _seal(self, store: KVStore, before: list[int], blocks: int, layer: int) -> None:
        """Seal the whole blocks of open tokens; rows without a sealed block before (`before`) rank their heads."""
        new = [n for n, held in enumerate(before) if not held]
        if self.ranks[layer] and new:
            at = shared(new, self.device)
            k, v = store.k_open[at, :, : self.shape.block], store.v_open[at, :, :, : self.shape.block].mT
            k_scale, v_scale = (x[at, :, : self.shape.block] for x in (store.k_scale, store.v_scale))
            order = ranked_heads(Tokens(k, k_scale, v, v_scale), self.config)
            store = store._replace(order=store.order.index_copy(0, at, order))
            self._order_of_page.index_copy_(0, store.table[at, 0], order)
        seal_open(store, blocks, backend=self.config.backend)

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Blocks `target` become copies of blocks `source`, in all layers."""
        layers = torch.arange(self.shape.layers, device=self.device)
        old, new = ((shared(n, self.device)[:, None] * self.shape.layers + layers).flatten() for n in (source, target))
        for pages in self.paged:
            for x in pages[1:]:
                x.index_copy_(0, new, x.index_select(0, old))
        if len(self._order_of_page):
            self._order_of_page.index_copy_(0, new, self._order_of_page.index_select(0, old))

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        """Slots `target` become copies of slots `source`."""
        old, new = shared(source, self.device), shared(target, self.device)
        for x in self._opened():
            x.index_copy_(1, new, x.index_select(1, old))


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
