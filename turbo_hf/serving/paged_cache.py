"""The cache of continuous batching: Transformers schedules blocks and shares prefixes, `Storage` holds the tokens.

Imports Transformers' continuous batching as it is from 5.19 on.
"""

import functools
import heapq
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    CacheAllocator,
    compute_block_hash,
)
from transformers.generation.continuous_batching.utils import find_head_dim

from turbo_hf.attention.turbo_attention import PackedCache
from turbo_hf.cache.memory import Memory
from turbo_hf.cache.rows import NewQKV
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import Scoring, power_of_two
from turbo_hf.serving.rows import Pass, Row, Shape, mixed_pass
from turbo_hf.serving.storage import Storage, kept_slots

FULL = "full_attention"
SLOT_SHARE = 16
"""At most one part in this many of the memory goes to slots of open tokens."""


@dataclass
class Serving:
    """What the managers of one patch have in common.

    shape, config, orders, balances: as in `Storage`.
    managers: those that exist.
    prompt_tokens: tokens of all prompts; hit_tokens: those of them that a stored prefix has saved.
    """

    shape: Shape
    config: TurboConfig
    orders: list[tuple[int, ...] | None]
    balances: list[torch.Tensor | None]
    managers: "WeakSet[Any]" = field(default_factory=WeakSet)
    prompt_tokens: int = 0
    hit_tokens: int = 0

    def memory(self) -> Memory | None:
        """The memory of the newest manager that has a cache; None: there is none."""
        made = [manager.batch_processor for manager in list(self.managers) if manager.batch_processor is not None]
        found: Memory | None = made[-1].cache.memory() if made else None
        return found

    def words(self) -> str:
        """For the report; "" before the first request."""
        found, of = self.hit_tokens, self.prompt_tokens
        share = f"{found:,} of {of:,} prompt tokens ({found / max(1, of):.0%})"
        return f"continuous batching: {share} were found in stored prefixes" if of else ""


class TurboAllocator(CacheAllocator):
    """Blocks of sealed pages, and the slot of each request. One for all layers, also those with a sliding window.

    A request has the blocks of `sealed`: the rest, its first tokens included, is in its slot. The first tokens of a
    stored prefix are in a slot beside those of requests.
    """

    supports_block_sharing = True
    supports_block_table = False
    rows_per_token = 2
    layer_type = FULL

    def __init__(self, shape: Shape, slots: int, share: bool):
        self.shape, self.slots = shape, slots
        # to Transformers, the pages of a block are one page: those of its layers may differ in size
        self._before_cache_tensor_init(0, [0], shape.block, shape.block_bytes, share)
        self.slot_of: dict[str, int] = {}
        # a heap: the lowest first, as steps have a row for each slot up to the highest in use
        self.free_slots = list(range(slots))
        # slots to copy before the next pass: (from, to)
        self.copies: list[tuple[int, int]] = []
        # by the hash of first tokens, the slot that keeps them, the least recently used first
        self.kept: dict[int, int] = {}
        self.free_kept = [slots + 1 + n for n in range(kept_slots(shape, slots) if share else 0)]
        # hashes of a request's whole blocks, in order
        self.chains: dict[str, list[int]] = {}
        self.held: dict[str, int] = {}
        # blocks of a stored prefix with which a request has begun
        self.given: dict[str, int] = {}

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """See Transformers."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def sealed(self, request_id: str, tokens: int) -> int:
        """Sealed blocks of a request once it holds so many tokens."""
        return max(self.given.get(request_id, 0), self.shape.sealed(tokens))

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Blocks that this many tokens seal, beyond those that the request has."""
        held = len(self.block_table.get(request_id, ()))
        return max(0, self.shape.sealed(past_length + query_length) - held)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """See Transformers; a new request also gets a slot."""
        self._take_slot(request_id)
        table = self.block_table.setdefault(request_id, [])
        table += self.pool.get_free_blocks(self.index, self.needs_new_blocks(request_id, past_length, query_length))

    def _take_slot(self, request_id: str) -> int:
        if request_id not in self.slot_of:
            self.slot_of[request_id] = heapq.heappop(self.free_slots)
        return self.slot_of[request_id]

    def has_slot(self, request_id: str) -> bool:
        """Whether the request has a slot, or can get one."""
        return request_id in self.slot_of or bool(self.free_slots)

    def rows(self, *, prompts: bool = False) -> int:
        """Slots up to the highest in use, rounded up to a power of two up to 128, then by less than a quarter.

        The products of a model's weights take as long with 128 rows as with one. Few sizes are few captures: beside
        `prompts`, of which there are many kinds, every other power of two is left out.
        """
        # two at least: what is cut from one tensor is then aligned as kernels want it
        used = max(2, 1 + max(self.slot_of.values(), default=0))
        step = power_of_two(used) if used <= 128 else power_of_two(used) // 8
        if prompts and used <= 64 and step in (4, 16, 64):
            step *= 2
        return min(self.slots, -(-used // step) * step)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """See Transformers. The deepest block first, as the oldest ones are given up first: a prefix stays whole."""
        freed = [n for n in self.block_table.pop(request_id, [])[::-1] if self.ledger.release(n, no_cache)]
        self.pool.free_blocks(self.index, freed)
        self.chains.pop(request_id, None)
        self.held.pop(request_id, None)
        self.given.pop(request_id, None)
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self.copies = [pair for pair in self.copies if pair[1] != slot]
            heapq.heappush(self.free_slots, slot)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """See Transformers."""
        slot = self.slot_of[dest_request_id] = heapq.heappop(self.free_slots)
        self.copies.append((self.slot_of[source_request_id], slot))
        if source_request_id in self.chains:
            self.chains[dest_request_id] = list(self.chains[source_request_id])
        self.given[dest_request_id] = self.given.get(source_request_id, 0)
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def _first_hash(self, token_ids: list[int]) -> int | None:
        """Of the first tokens: the parent of the first block."""
        first = self.shape.first
        return compute_block_hash(None, token_ids[:first]) if first else None

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """See Transformers; a prefix also needs its first tokens. The recent ones a request computes itself."""
        found: list[int] = []
        parent, block = self._first_hash(prompt_ids), self.shape.block
        if parent is not None and parent not in self.kept:
            return found
        for at in range(self.shape.first, len(prompt_ids) - block - max(0, self.shape.recent - 1), block):
            parent = compute_block_hash(parent, prompt_ids[at : at + block])
            if parent not in self.ledger.hash_to_block:
                break
            found.append(self.ledger.hash_to_block[parent])
        return found

    def give_first(self, request_id: str, prompt_ids: list[int]) -> None:
        """A request that begins with a stored prefix gets the first tokens of that."""
        first = self._first_hash(prompt_ids)
        if first is not None:
            # now the most recently used
            self.kept[first] = self.kept.pop(first)
            self.copies.append((self.kept[first], self._take_slot(request_id)))

    def _keep_first(self, request_id: str, first: int) -> None:
        """Keep the first tokens of a request, in the place of those that were not used for longest."""
        if first not in self.kept and (self.free_kept or self.kept):
            slot = self.free_kept.pop() if self.free_kept else self.kept.pop(next(iter(self.kept)))
            self.kept[first] = slot
            self.copies.append((self.slot_of[request_id], slot))

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """See Transformers."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        self.chains[request_id] = [self.ledger.block_to_hash[n] for n in self.block_table[request_id]]
        self.given[request_id] = len(self.chains[request_id])

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Make the newest whole blocks known. A request keeps its own ones where others hold the same tokens: computed
        from other chunks, these may differ in bits."""
        if request_id not in self.block_table:
            # it was cancelled while the pass ran
            return
        table, block, first = self.block_table[request_id], self.shape.block, self._first_hash(token_ids)
        chain = self.chains.setdefault(request_id, [])
        end = min(len(chain) + new_new_blocks, len(table), self.shape.sealed(len(token_ids)))
        if end and first is not None:
            self._keep_first(request_id, first)
        for n in range(len(chain), end):
            parent, at = chain[-1] if chain else first, self.shape.first + n * block
            chain.append(compute_block_hash(parent, token_ids[at : at + block]))
            self.ledger.register_new_hash(table[n], chain[-1])

    def evict(self, count: int) -> bool:
        """Give up the `count` blocks that no request has used for longest; returns whether there were any."""
        ledger = self.ledger
        oldest = list(ledger.cached_blocks)[:count]
        for block in oldest:
            del ledger.cached_blocks[block]
            del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
        self.pool.free_blocks(self.index, oldest)
        return bool(oldest)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """See Transformers."""
        return past_length + query_length

    def get_read_indices(self, *args: Any) -> list[int]:
        """None: pages are read where they are."""
        return []

    get_write_indices: Any = get_read_indices

    def update(self, *args: Any) -> Any:
        """Not called: `TurboPagedCache` notes rows, and attends."""
        raise NotImplementedError

    get_cache_for_block_table: Any = update
    fill_block_table: Any = update


class _Planner(PagedAttentionMemoryHandler):
    """Plans memory for pages that are read in place: no copies that are read back, and no masks."""

    def __init__(self, shape: Shape, **options: Any):
        super().__init__(**options)
        self.num_attention_masks = 0
        heads, dim = self.config.num_attention_heads, find_head_dim(self.config)
        # queries, keys and values of a chunk in INT8 or balanced, beside what is charged anyway
        self.kv_heads_at_peak = heads + 2 * shape.heads
        if shape.expanded:
            # `head_dim` is that of rotary parts: queries, keys and values as they are expanded, and put together
            self.kv_heads_at_peak = -(-3 * shape.expanded // dim)
        # what is expanded of pasts, and joined with new tokens
        self.past_bytes = 2 * shape.expanded * shape.together * self.activation_dtype.itemsize
        most, share = self.cb_config.max_requests_per_batch, self.available_memory // SLOT_SHARE
        tokens = self.cb_config.max_batch_tokens or self._default_max_batch_tokens
        self.slots = max(1, min(most or 1, tokens, share // shape.slot))
        # and the spare one, and those of stored prefixes
        self.slot_bytes = (self.slots + 1 + kept_slots(shape, self.slots)) * shape.slot

    @property
    def bytes_per_cache_token(self) -> int:
        """Only the read indices, which Transformers allocates nevertheless."""
        return self.io_multiplier * self.num_groups * 8

    @property
    def fixed_overhead_bytes(self) -> int:
        """The slots are allocated beside the pool, and so are keys and values expanded of latents."""
        return super().fixed_overhead_bytes + self.slot_bytes + self.past_bytes


class TurboPagedCache(PagedAttentionCache, PackedCache):
    """A `PagedAttentionCache` of compressed pages, with one allocator. Arguments as in Transformers, and `serving`."""

    def __init__(
        self,
        config: Any,
        continuous_batching_config: ContinuousBatchingConfig,
        device: torch.device,
        dtype: torch.dtype,
        model_supports_logits_to_keep: bool,
        serving: Serving,
    ):
        cb, shape = continuous_batching_config, serving.shape
        self.config, self.dtype, self.device, self.serving = config, dtype, device, serving
        # passes in which each request brings one token are marked, however long the requests are
        self.max_blocks_per_request, self.max_decode_fast_path_length = 1, 1 << 62
        self.bytes_per_sector, self.tokens_per_sector = shape.block_bytes, shape.block
        # `num_blocks` counts blocks of `page_size` tokens, as in Transformers, whatever their bytes
        counted = -(-self.bytes_per_sector * cb.page_size // shape.block)
        planner = _Planner(
            shape,
            config=config,
            cb_config=cb,
            dtype=dtype,
            bytes_per_sector=self.bytes_per_sector,
            tokens_per_sector=self.tokens_per_sector,
            bytes_per_block=counted,
            attn_types=[FULL],
            model_supports_logits_to_keep=model_supports_logits_to_keep,
        )
        self.max_batch_tokens, sectors = planner.infer_max_batch_tokens_and_num_sectors()
        self.num_sectors = max(1, sectors)
        total = self.num_sectors * self.bytes_per_sector
        self.cache_tensor = torch.zeros(total, dtype=torch.uint8, device=device)
        self.pool = CachePool(self.num_sectors, 1, num_reserved_sectors=0)
        self.allow_block_sharing = cb.allow_block_sharing
        self.allocator = TurboAllocator(shape, planner.slots, self.allow_block_sharing)
        self.allocator.register_cache_tensor(self.bytes_per_sector, total, self.cache_tensor, self.pool)
        self.cache_allocators = {FULL: self.allocator}
        self.layer_to_allocator = dict.fromkeys(range(shape.layers), self.allocator)
        self.use_prefix_sharing = self.allow_block_sharing
        self.num_blocks = max(1, total // counted)
        # pages are read in place: what a batch reads has no limit
        self.read_cache_limit: int | None = 0
        self.max_tokens_read = self.num_sectors * shape.block
        self.storage = Storage(
            shape, serving.config, self.cache_tensor, dtype, planner.slots, serving.orders, serving.balances
        )
        self._coming: list[Row] = []
        self.now = Pass([], [])

    def begin_session(self) -> None:
        """Forget what an earlier session has left behind, but for the stored prefixes."""
        self._coming, self.now = [], Pass([], [])
        # their first tokens may still be to be copied
        self.allocator.copies = [pair for pair in self.allocator.copies if pair[1] in self.allocator.kept.values()]
        self.storage.nonfinite.zero_()

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that fits."""
        shape = self.serving.shape
        return shape.first + self.num_sectors * shape.block + shape.recent + shape.block - 1

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """See Transformers; a request also needs a slot."""
        return self.allocator.has_slot(state.request_id) and super().can_store_request_tokens(
            state, request_len, dry_run
        )

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """See Transformers; counts what is found."""
        # a match makes the request active: only if it can go on
        if not self.allocator.has_slot(request_id):
            return 0
        found = super().search_prefix_match(request_id, prompt_ids)
        if found:
            self.allocator.give_first(request_id, prompt_ids)
            found += self.serving.shape.first
        self.serving.hit_tokens += found
        return int(found)

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """See Transformers."""
        held, sealed = state.current_len(), functools.partial(self.allocator.sealed, state.request_id)
        count = sealed(held + request_len) - sealed(held)
        return {FULL: count} if count and self.use_prefix_sharing else {}

    def evict_cached_blocks(self) -> bool:
        """Give up stored prefixes that no request uses, the oldest first, until a quarter of the pool is free; at least
        one block in sixteen, so that repeated calls free all of them."""
        free = self.num_sectors - self._blocks_in_use()
        return self.allocator.evict(max(self.num_sectors // 4 - free, self.num_sectors // 16, 1))

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: dict[str, tuple[list[int], list[int]]]
    ) -> list[str]:
        """See Transformers; children beyond the free slots wait as new requests."""
        there = dst_req_ids[: len(self.allocator.free_slots)]
        forked: list[str] = super().prepare_fork_request(src_state, there, copy_src_and_dst)
        return forked

    def perform_cache_copy(self, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> None:
        """See Transformers."""
        for source, target in copy_src_and_dst.values():
            if source:
                self.storage.copy_blocks(source, target)
        self._copy_slots()

    def _copy_slots(self) -> None:
        """One after the other: a slot that is copied may be the copy of another one."""
        copies, self.allocator.copies = self.allocator.copies, []
        for old, new in copies:
            self.storage.copy_slots([old], [new])

    def extend_read_and_write_indices(self, request_id: str, past_length: int, query_length: int, *args: Any) -> None:
        """See Transformers: called for each request of the coming pass, in order."""
        self.note(request_id, past_length, query_length)

    # in passes in which each request brings one token
    fill_block_table: Any = extend_read_and_write_indices

    def note(self, request_id: str, past_length: int, query_length: int) -> None:
        """The next request of the coming pass: what the host knows of it."""
        allocator, ahead = self.allocator, self._coming[-1:]
        first = ahead[0].first + ahead[0].new if ahead else 0
        before, sealed = (allocator.sealed(request_id, past_length + new) for new in (0, query_length))
        blocks = list(allocator.block_table[request_id][:sealed])
        slot = allocator.slot_of[request_id]
        self._coming.append(Row(request_id, past_length, before, query_length, first, slot, blocks))
        allocator.held[request_id] = past_length + query_length

    def begin_pass(self) -> list[Row]:
        """The requests of the pass that begins."""
        rows, self._coming = self._coming, []
        self._copy_slots()
        return rows

    def mix(self, rows: list[Row]) -> None:
        """The pass that begins holds these requests' tokens one after the other."""
        storage = self.storage
        self.now = mixed_pass(rows, self.allocator.rows(), storage.shape, storage.device, storage.spare)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by attention modules from transformers 5.24 on, where they, not their keywords, have the cache: it
        joins `kwargs`, where attention looks for it."""
        kwargs["cache"] = self
        return key_states, value_states

    def attend(self, module: Any, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """See `PackedCache`."""
        return self.storage.attend(self.now, module, qkv, scoring, window)

    def _blocks_in_use(self) -> int:
        """Blocks of requests and of stored prefixes."""
        return self.num_sectors - int(self.pool.num_free_sectors) - int(self.pool.count_free_blocks(0))

    def memory(self) -> Memory:
        """Bytes of the blocks and slots that hold tokens, stored prefixes included."""
        shape, allocator = self.serving.shape, self.allocator
        blocks = self._blocks_in_use()
        held = list(allocator.held.items())
        opened = sum(tokens - allocator.sealed(name, tokens) * shape.block for name, tokens in held)
        layers = []
        for page, groups in zip(shape.pages, self.storage.paged, strict=True):
            scales = sum(x[0].nbytes for pages in groups for x in pages[3:])
            slots = len(allocator.slot_of) * shape.slot // shape.layers
            layers.append({"codes": blocks * (page - scales), "scales": blocks * scales, "open": slots})
        tokens = blocks * shape.block + opened
        channels = shape.dim + (shape.rotary_dim or shape.dim)
        full = shape.layers * shape.heads * channels * self.dtype.itemsize * tokens
        return Memory(tuple(layers), tokens, full, dtype=str(self.dtype).removeprefix("torch."))
