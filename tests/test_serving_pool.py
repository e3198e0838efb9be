"""The pool of continuous batching, counted a second time; and when the next batch is prepared, by a simulated clock."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers", minversion="5.19")

from transformers.generation.continuous_batching.cache_allocators import CachePool  # noqa: E402

from turbo_hf.layout import FIRST  # noqa: E402
from turbo_hf.serving.pace import MARGIN, MOST_WAIT, Pace  # noqa: E402
from turbo_hf.serving.paged_cache import TurboAllocator  # noqa: E402
from turbo_hf.serving.rows import Shape  # noqa: E402


class Pool:
    """A pool of blocks and what requests of it should hold, counted a second time."""

    def __init__(self, recent: int) -> None:
        self.shape = shape = Shape((((4, 2),), ((8, 2),)), 16, 64, first=FIRST, recent=recent)
        self.blocks = 12
        self.allocator = TurboAllocator(shape, 4, True)
        size = shape.block_bytes
        self.pool = CachePool(self.blocks, 1, num_reserved_sectors=0)
        memory = torch.empty(size * self.blocks, dtype=torch.uint8)
        self.allocator.register_cache_tensor(size, memory.numel(), memory, self.pool)
        self.tokens: dict[str, list[int]] = {}
        # the first tokens that lie in each slot
        self.first: dict[int, list[int]] = {}
        self.made = 0

    def copy_slots(self) -> None:
        """As before a pass."""
        for old, new in self.allocator.copies:
            self.first[new] = self.first.get(old, [])
        self.allocator.copies = []

    def check(self) -> None:
        """Each block is free, stored, or held, by as many requests as the ledger says; each slot is free or held."""
        allocator, ledger = self.allocator, self.allocator.ledger
        assert {*allocator.block_table} == {*self.tokens}
        held = Counter(block for table in allocator.block_table.values() for block in table)
        for block, count in held.items():
            assert ledger.shared_ref_counts.get(block, 1) == count
        free = self.pool.num_free_sectors + self.pool.count_free_blocks(0)
        assert not {*held} & {*ledger.cached_blocks}
        assert len(held) + len(ledger.cached_blocks) + free == self.blocks
        assert sorted([*allocator.free_slots, *allocator.slot_of.values()]) == list(range(allocator.slots))
        for name, tokens in self.tokens.items():
            assert len(allocator.block_table[name]) == allocator.sealed(name, len(tokens))
            assert self.first[allocator.slot_of[name]] == tokens[:FIRST]
        kept = [*allocator.free_kept, *allocator.kept.values()]
        assert kept == [allocator.slots + 1], "beside those of requests and of none"
        assert {*ledger.block_to_hash} <= {*held, *ledger.cached_blocks}
        assert {block: code for code, block in ledger.hash_to_block.items()} == ledger.block_to_hash

    def store(self, name: str, new: list[int]) -> bool:
        """Give `new` to a request, as a pass would; False: there is no room."""
        past, allocator = len(self.tokens[name]), self.allocator
        sectors = allocator.needs_new_sectors(name, past, len(new))
        if not allocator.has_slot(name) or sectors > self.pool.num_free_sectors:
            return False
        for _ in range(sectors):
            self.pool.allocate_sector(0)
        allocator.allocate_cache_to_request(name, past, len(new))
        self.copy_slots()
        self.tokens[name] = self.tokens[name] + new
        if past < FIRST:
            self.first[allocator.slot_of[name]] = self.tokens[name][:FIRST]
        before, after = (allocator.sealed(name, past + n) for n in (0, len(new)))
        allocator.mark_complete_blocks(name, self.tokens[name], after - before)
        return True


acts = st.tuples(st.sampled_from(("arrive", "grow", "fork", "end", "drop", "evict")), st.integers(0, 99))


@given(st.lists(acts, max_size=80), st.sampled_from((0, 64)))
@settings(max_examples=150)
def test_no_block_is_lost_and_none_is_freed_twice(script: list[tuple[str, int]], recent: int) -> None:
    pool = Pool(recent)
    allocator = pool.allocator
    for act, number in script:
        names = list(pool.tokens)
        name = names[number % len(names)] if names else ""
        if act == "arrive" and allocator.free_slots:
            pool.made += 1
            name, prompt = f"r{pool.made}", [number % 2] * (64 + number * 2)
            found = allocator.match_prefix_blocks(prompt)
            past = FIRST + 64 * len(found) if found else 0
            pool.tokens[name] = prompt[:past]
            assert len(prompt) - past >= max(1, recent), "it computes these itself"
            if found:
                allocator.acquire_prefix_blocks(name, 64 * len(found), found)
                allocator.give_first(name, prompt)
            if not pool.store(name, prompt[past:]):
                allocator.free_blocks(name)
                del pool.tokens[name]
        elif act == "grow" and name:
            pool.store(name, [2] * number)
        elif act == "fork" and name and allocator.free_slots:
            pool.made += 1
            child = f"r{pool.made}"
            source, _ = allocator.fork_blocks(name, child, len(pool.tokens[name]))
            assert not source, "whole blocks are shared, and the rest is in the slot"
            pool.tokens[child] = list(pool.tokens[name])
            pool.copy_slots()
        elif act in ("end", "drop") and name:
            allocator.free_blocks(name, no_cache=act == "drop")
            del pool.tokens[name]
        elif act == "evict":
            allocator.evict(number % 3)
        pool.pool.try_to_free_sectors()
        pool.check()
    # of a request that was cancelled while a pass of it ran
    allocator.mark_complete_blocks("gone", [1] * 80, 1)
    for name in list(pool.tokens):
        allocator.free_blocks(name)
    allocator.evict(pool.blocks)
    pool.pool.try_to_free_sectors()
    assert pool.pool.num_free_sectors == pool.blocks


def simulate(took: list[float], preparation: float) -> tuple[list[float], float]:
    """Passes that take so long on the device: how long each was waited for before the next was prepared, and how long
    the device stood still in all."""
    pace, now, free, idle = Pace(), 0.0, 0.0, 0.0
    waits, ends = [], []
    for n, seconds in enumerate(took):
        waits.append(pace.wait(now))
        now = begun = now + waits[-1]
        now += preparation
        idle += max(0.0, now - free) * (n > 0)
        free = max(now, free) + seconds
        ends.append(free)
        pace.launched("a", begun, now)
        if n:
            runs = ends[n - 1] > now
            now = max(now, ends[n - 1])
            pace.ended(now, just_now=runs)
    return waits, idle


@pytest.mark.parametrize(
    ("took", "tail", "idle"),
    [
        pytest.param([0.010] * 30, 20, 0, id="just before the pass ahead ends"),
        pytest.param([0.020] * 20 + [0.010] * 30, 1, 0.010, id="quicker passes are found out, which costs one pass"),
        pytest.param([0.010, 0.020] * 20, 30, 0, id="two lengths"),
    ],
)
def test_a_batch_is_prepared_as_late_as_it_may_be(took: list[float], tail: int, idle: float) -> None:
    waits, idled = simulate(took, 0.003)
    assert waits[-tail:] == pytest.approx([0.010 - 0.003 - MARGIN] * tail)
    assert idled <= idle


def test_a_pass_that_was_held_up_holds_up_nothing_else() -> None:
    waits, _ = simulate([30.0] + [0.010] * 20, 0.003)
    assert max(waits) == MOST_WAIT
    waits, _ = simulate([0.010] * 10 + [30.0] + [0.010] * 20, 0.003)
    assert max(waits) == pytest.approx(0.010 - 0.003 - MARGIN)
    # a long preparation begins at once
    assert simulate([0.002] * 20, 0.003)[0] == [0.0] * 20


def test_nothing_is_waited_for_where_nothing_is_known() -> None:
    pace = Pace()
    assert pace.wait(1.0) == 0
    pace.ended(1.0, just_now=True)
    for begun in (1.0, 2.0):
        pace.launched(None, begun, begun + 0.1)
        assert pace.wait(begun + 0.1) == 0
    pace.ended(3.0, just_now=True)
    pace.launched("a", 4.0, 4.1)
    pace.reset()
    assert pace.wait(5.0) == 0
