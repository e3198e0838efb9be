"""Keys and values of all requests: sealed pages in the pool that Transformers plans, open tokens in slots beside it.

The pool's blocks hold one page for each layer; the bytes of a page are those of `turbo_hf.layout`, but all keys of all
pages come first, then all values, and so on, layer by layer, so that the ops see ordinary `PagedHeads`: the page of
block n of each layer has the number n. A slot holds the open tokens of one request in every layer. Layers of latent
attention store latents in the place of keys, and rotary parts in that of values.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from turbo_hf.attention.latent import absorbed_attention, expanded_attention, require_plain, up_projections
from turbo_hf.attention.prompt import packed_attention, prompt_attention
from turbo_hf.cache.rows import NewQKV
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.layout import KVStore, PagedHeads, Scoring, empty_pages
from turbo_hf.ops.host_device import shared
from turbo_hf.ops.layer_ops import ops_of
from turbo_hf.patches.latent import expanded
from turbo_hf.serving.rows import Blocks, Pass, Prompts, Shape, StepRows, gathered


class Storage:
    """The tensors, and what a pass does with them, layer by layer.

    pool: uint8, the bytes of all blocks.
    dtype: of new keys and values.
    slots: how many requests may have open tokens at once.
    balances: for each layer, what stored keys are divided by, float32 [Hkv, D]; None: by nothing.
    orders: for each layer, KV heads by their need of bits; None: as they are numbered.
    """

    def __init__(
        self,
        shape: Shape,
        config: TurboConfig,
        pool: torch.Tensor,
        dtype: torch.dtype,
        slots: int,
        orders: list[tuple[int, ...] | None],
        balances: list[torch.Tensor | None],
    ):
        self.shape, self.config, self.device = shape, config, pool.device
        self.blocks = pool.numel() // shape.block_bytes
        # of each layer
        self.balances = [None if x is None else x.to(self.device) for x in balances]
        self.paged = _carve(pool, self.blocks, shape)
        layers, heads, dim, room = shape.layers, shape.heads, shape.dim, shape.room
        like = torch.empty(0, dim, dtype=dtype, device=self.device)
        self.ops = [ops_of(config, like, groups, shape.rotary_dim) for groups in shape.groups]
        # of what is stored in the place of values
        self._channels = shape.rotary_dim or dim
        # one of no request, and those of `TurboAllocator.kept`
        self.spare, every = slots, slots + 1 + kept_slots(shape, slots)
        # the slots of all layers: k, v, k_scale and v_scale
        self.opened = (
            torch.empty(layers, every, heads, room, dim, dtype=shape.opened, device=self.device),
            torch.empty(layers, every, heads, self._channels, room, dtype=shape.opened, device=self.device),
            *torch.empty(2, layers, every, heads, room, device=self.device),
        )
        self.nonfinite = torch.zeros(layers, dtype=torch.int32, device=self.device)
        plain = torch.arange(heads, device=self.device)
        given = [plain if order is None else torch.tensor(order, device=self.device) for order in orders]
        # of each row
        self._given = torch.stack(given)[:, None].repeat(1, slots, 1)
        # not tried with latents
        self._side = torch.cuda.Stream(self.device) if pool.is_cuda and shape.rotary_dim is None else None

    def attend(self, now: Pass, module: Any, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """Store the new tokens of one layer, and attend; shapes as in `PackedCache.attend`."""
        shape, layer, tokens = self.shape, module.layer_idx, qkv.key.shape[2]
        heads = (1, shape.heads, tokens)
        if (qkv.key.shape, qkv.value.shape) != ((*heads, shape.dim), (*heads, self._channels)):
            raise Unsupported(
                f"layer {layer}: the pool has pages for {heads[1]} KV heads of {shape.dim} channels, and this layer "
                f"brings keys {list(qkv.key.shape)} and values {list(qkv.value.shape)}. Use generate, or remove the "
                "patch."
            )
        prompts, channels = qkv, shape.dim
        if shape.rotary_dim is not None:
            require_plain(layer, scoring)
            channels = module.v_head_dim
            if now.prompts:
                prompts = NewQKV(qkv.query, *expanded(module, qkv.key, qkv.value))
        if now.fixed:
            return self._fixed(now, module, qkv, prompts, scoring, window)
        packed, out = now.packed, None
        if packed is not None and packed.tokens == tokens:
            out = packed_attention(self.config, prompts, packed.edges, packed.longest, window, scoring)
        done = [] if packed is None or out is None else packed.rows
        if out is None:
            # zeros for tokens that only fill a pass up
            out = qkv.query.new_zeros(*qkv.query.shape[:3], channels)
        for rows in now.steps:
            own = NewQKV(*(rows.take(x) for x in qkv))
            rows.put(out, self._steps(rows, module, own, scoring, window, False))
        for group in now.prompts:
            # of a group, all or none are packed
            if group.rows[0] not in done:
                own = NewQKV(*(group.take(x) for x in prompts))
                group.put(out, self._prompts(group, module, own, self._past(group, layer), scoring, window))
        if now.blocks is not None:
            self._store(now.blocks, layer, qkv)
        return out

    def _fixed(
        self, now: Pass, module: Any, qkv: NewQKV, prompts: NewQKV, scoring: Scoring, window: int | None
    ) -> torch.Tensor:
        """As `attend`, where tokens lie as in `Layout`. prompts: as prompts attend to them."""
        outs, at = [], 0
        for rows in now.steps:
            own = NewQKV(*(x[0, :, : rows.size].transpose(0, 1).unsqueeze(2) for x in qkv))
            outs.append(self._steps(rows, module, own, scoring, window, True).squeeze(2).transpose(0, 1)[None])
            at += rows.size
        # one group at most (`Layout`), so that all is stored once
        for group in now.prompts:
            own = NewQKV(*(x[0, :, at:].unflatten(1, (group.count, group.new)).transpose(0, 1) for x in prompts))
            past = self._past(group, module.layer_idx)
            assert now.blocks is not None
            with self._beside(functools.partial(self._store, now.blocks, module.layer_idx, qkv)):
                out = self._prompts(group, module, own, past, scoring, window)
            outs.append(out.transpose(0, 1).flatten(1, 2)[None])
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    @contextmanager
    def _beside(self, other: Callable[[], None]) -> Iterator[None]:
        """`other`, on a stream of its own beside what is launched inside if that is captured, else before it.

        What is launched inside must read nothing that `other` writes, and `other` nothing that is freed inside.
        """
        if self._side is None or not torch.cuda.is_current_stream_capturing():
            other()
            yield
            return
        here = torch.cuda.current_stream(self.device)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            other()
        yield
        here.wait_stream(self._side)

    def _view(
        self,
        layer: int,
        table: torch.Tensor,
        sealed: torch.Tensor,
        opened: Iterable[torch.Tensor],
        open_len: torch.Tensor,
        sealed_host: tuple[int, ...] | None = None,
        plans: dict[Any, Any] | None = None,
    ) -> KVStore:
        """Rows of one layer as ops see them; the arguments as in `KVStore`."""
        (k, v, k_scale, v_scale), given, rows = opened, self._given[layer], len(table)
        places = (given[:rows] if rows <= len(given) else given[:1].expand(rows, -1), table, sealed)
        opens = (k, v, k_scale, v_scale, open_len)
        shape = self.shape
        return KVStore(self.paged[layer], *places, *opens, shape.block, sealed_host, plans, shape.first, shape.recent)

    def _steps(
        self, rows: StepRows, module: Any, qkv: NewQKV, scoring: Scoring, window: int | None, fixed: bool
    ) -> torch.Tensor:
        """The new tokens join the open ones, then attention reads them; blocks that have become whole are sealed.

        The tensors of `rows` alone determine what it does, so that it can be replayed.
        """
        layer, latent = module.layer_idx, self.shape.rotary_dim is not None
        ops, opened = self.ops[layer], (x[layer, : rows.size] for x in self.opened)
        # a capture must do for rows of any length
        planned = (None if latent else rows.sealed_host, rows.plans)
        store = self._view(layer, rows.table, rows.sealed, opened, rows.open_len[layer], *planned)
        balance = self.balances[layer]
        balanced = ops.append_tokens(
            qkv.key,
            qkv.value,
            store,
            starts=rows.starts,
            nonfinite=self.nonfinite[layer : layer + 1],
            arrived=rows.arrived,
            balance=balance,
            queries=None if balance is None else qkv.query,
        )
        if latent:
            up = up_projections(module, qkv.query.dtype)
            out = absorbed_attention(ops, up, qkv.query, store, rows.starts, scoring)
        else:
            queries = qkv.query if balanced is None else balanced
            out = ops.decode(queries, store, scoring, starts=rows.starts, window=window).out
        # a capture seals whenever it must
        if fixed or rows.seals:
            ops.seal_open(store._replace(sealed=rows.after, sealed_host=None), 1, moves=True)
        return out

    def _past(self, prompts: Prompts, layer: int) -> KVStore | None:
        """What requests with chunks hold, their open tokens as copies; None: nothing."""
        if not prompts.past:
            return None
        opened = (x[layer].index_select(0, prompts.slots) for x in self.opened)
        return self._view(layer, prompts.table, prompts.sealed, opened, prompts.open_len)

    def _prompts(
        self, prompts: Prompts, module: Any, qkv: NewQKV, past: KVStore | None, scoring: Scoring, window: int | None
    ) -> torch.Tensor:
        """Attention of prompts, or chunks of such, which reads the tokens as they come."""
        starts = prompts.starts if prompts.padded else None
        if self.shape.rotary_dim is not None:
            return expanded_attention(module, qkv, past, starts, scoring)
        ops, balance = self.ops[module.layer_idx], self.balances[module.layer_idx]
        return prompt_attention(self.config, ops, qkv, past, starts, window, scoring, balance=balance)

    def _store(self, blocks: Blocks, layer: int, qkv: NewQKV) -> None:
        """The new tokens of prompts: whole blocks are sealed, what is behind them goes to the slots."""
        count, heads, dim, block = blocks.count, self.shape.heads, self.shape.dim, self.shape.block
        how: dict[str, Any] = {"dtype": self.shape.opened, "device": self.device}
        k, v = (gathered(x, blocks.tokens, count) for x in qkv[1:])
        opened = (
            torch.empty(count, heads, block, dim, **how),
            torch.empty(count, heads, self._channels, block, **how),
            *torch.empty(2, count, heads, block, device=self.device),
        )
        # entry 0 of a row of the table is its block, which is sealed if `sealed` counts it
        store = self._view(layer, blocks.table, blocks.sealed, opened, blocks.open_len[layer])
        store = store._replace(first=0, recent=0)
        ops, flag = self.ops[layer], self.nonfinite[layer : layer + 1]
        ops.append_tokens(k, v, store, nonfinite=flag, arrived=blocks.arrived, balance=self.balances[layer])
        k, v, k_scale, v_scale = (x[layer] for x in self.opened)
        slots, begin = (k, v, k_scale, v_scale), self.shape.first
        if begin:
            front = blocks.front
            ops.exchange_open(opened, slots, blocks.front_slots, front, front, blocks.early)
        # the last part first: the row that the one before it takes then begins with what it held
        for part in reversed(range(blocks.parts)):
            rows = blocks.begin[part], blocks.last[part], blocks.held[part]
            ops.exchange_open(opened, slots, blocks.slots, *rows, begin + part * block)
        if blocks.seals:
            ops.seal_open(store, 1)

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Blocks `target` become copies of blocks `source`, in all layers."""
        old, new = shared(source, self.device), shared(target, self.device)
        for x in (x for groups in self.paged for pages in groups for x in pages[1:]):
            x.index_copy_(0, new, x.index_select(0, old))

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        """Slots `target` become copies of slots `source`."""
        old, new = shared(source, self.device), shared(target, self.device)
        for x in self.opened:
            x.index_copy_(1, new, x.index_select(1, old))


def kept_slots(shape: Shape, slots: int) -> int:
    """Slots beside those of requests, for the first tokens of stored prefixes: each is of all that begin alike."""
    return -(-slots // 4) if shape.first else 0


def _carve(pool: torch.Tensor, blocks: int, shape: Shape) -> list[tuple[PagedHeads, ...]]:
    """For each layer, `PagedHeads` of `blocks` pages in the bytes of `pool`."""
    rest = shape.dim, shape.block, torch.device("meta"), shape.opened, shape.rotary_dim
    like = [[empty_pages(width, blocks, slots, *rest) for width, slots in groups] for groups in shape.groups]
    carved: list[list[list[Any]]] = [[[pages.bits] for pages in layer] for layer in like]
    at = 0
    # each is a multiple of 16 bytes, so that all begin at one
    for name in ("k", "v", "meta", "size"):
        for layer, own in zip(like, carved, strict=True):
            for pages, parts in zip(layer, own, strict=True):
                x = getattr(pages, name)
                parts.append(pool[at : at + x.nbytes].view(x.dtype).view(x.shape))
                at += x.nbytes
    return [tuple(PagedHeads(*parts) for parts in own) for own in carved]
