"""Steps that can be replayed store, bit by bit, what the host's own path stores; pages that they reserve ahead."""

import copy
import operator
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from choices import flat_config
from models import SHAPE
from steps_support import (
    CONFIGS,
    DIM,
    HEADS,
    KMEANS,
    LENGTHS,
    assert_same,
    assert_shows_same,
    buckets_of,
    by_both,
    by_host,
    by_steps,
    filled,
    new_tokens,
    without_kernels,
)
from stores import tokens
from torch import Tensor
from transformers import LlamaConfig
from transformers.cache_utils import DynamicLayer

from turbo_hf import TurboCache, TurboConfig
from turbo_hf.cache.rows import NewColumns
from turbo_hf.graphs import replayable_steps as steps
from turbo_hf.graphs.replayable_steps import ReplayableSteps
from turbo_hf.graphs.why_not import why_no_replay
from turbo_hf.layout import FIRST


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)


def settle(cache: TurboCache) -> None:
    """What any other pass does first: seal what steps have left due."""
    for layer in cache.turbo_layers():
        layer.seal_leftovers(1)


@pytest.mark.parametrize("config", [*CONFIGS, pytest.param(flat_config(block_size=32, low_heads=0.5), id="mixed")])
def test_steps_store_what_the_host_stores(config: TurboConfig) -> None:
    replayed, plain = filled(config), filled(config)
    run = ReplayableSteps(replayed)
    for _ in range(105):
        assert run.intact()
        by_both(run, plain)
    settle(replayed)
    assert [layer.state.sealed for layer in replayed.turbo_layers()] == [
        layer.state.sealed for layer in plain.turbo_layers()
    ]
    assert_same(replayed, plain)


@pytest.mark.parametrize("recent", [32, 64])
def test_steps_themselves_move_what_is_behind_a_block(recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = flat_config(block_size=32, low_heads=0.5, recent_tokens=recent)
    replayed, plain = filled(config), filled(config)
    run = ReplayableSteps(replayed)
    monkeypatch.delattr(ReplayableSteps, "_seal")
    for _ in range(150):
        by_both(run, plain)
    settle(replayed)
    assert min(replayed.turbo_layers()[0].state.sealed) >= 2
    assert_same(replayed, plain)


def test_no_page_is_reserved_for_tokens_that_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AHEAD", 1)
    cache = filled(flat_config(block_size=32, recent_tokens=128), lengths=[150, 150])
    run = ReplayableSteps(cache)
    for _ in range(80):
        by_steps(run, new_tokens(2))
        for layer in cache.turbo_layers():
            assert layer.pool.table.reserved <= [sealed + 1 for sealed in layer.state.sealed]


def test_a_window_drops_its_blocks_when_pages_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AHEAD", 2)
    replayed, plain = filled(flat_config(block_size=32), window=40), filled(flat_config(block_size=32), window=40)
    run = ReplayableSteps(replayed)
    for _ in range(230):
        by_both(run, plain)
        for layer in replayed.turbo_layers():
            # what the window needs, the block being filled, and as much as is reserved at a time
            assert max(layer.lengths()) <= 40 + 32 + 3 * 32
    for cache in (replayed, plain):
        for layer in cache.turbo_layers():
            assert layer.dequantized(39)[0].any(-1).all()
    assert_shows_same(replayed, plain, 39)
    # pages are used again: no more than are held and reserved
    assert all(layer.pool.pages <= 3 * 8 for layer in replayed.turbo_layers())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda cache: cache.crop(-1), id="crop-1"),
        pytest.param(lambda cache: cache.crop(-40), id="crop-below-a-seal"),
        pytest.param(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), id="reorder"),
        pytest.param(lambda cache: cache.batch_select_indices(torch.tensor([1, 0])), id="select"),
        pytest.param(lambda cache: cache.batch_repeat_interleave(2), id="repeat"),
        pytest.param(lambda cache: by_host(cache, new_tokens()), id="pass"),
    ],
)
@pytest.mark.parametrize("count", [26, 31, 60])
def test_other_changes_between_steps(change: Callable[[TurboCache], None], count: int) -> None:
    config = flat_config(block_size=32, low_heads=0.5, sparse=KMEANS)
    replayed, plain = filled(config), filled(config)
    run = ReplayableSteps(replayed)
    for _ in range(2):
        for _ in range(count):
            by_both(run, plain, replayed.turbo_layers()[0].rows)
        settle(replayed)
        for cache in (replayed, plain):
            torch.manual_seed(7)
            change(cache)
        assert not run.intact()
        assert_same(replayed, plain)
        assert why_no_replay(replayed) is None
        run = ReplayableSteps(replayed)


EQUAL = [70, 70, 33, 70, 33, 33]
"""Beams of two prompts."""


@pytest.mark.parametrize("config", CONFIGS[:5])
def test_rows_of_equal_lengths_are_reordered_in_place(config: TurboConfig) -> None:
    replayed, plain = (filled(config, lengths=EQUAL) for _ in range(2))
    run, generator = ReplayableSteps(replayed), torch.Generator().manual_seed(1)
    for _ in range(150):
        by_both(run, plain, len(EQUAL))
        before = run.tensors()
        order = torch.arange(len(EQUAL))
        for beams in ([0, 1, 3], [2, 4, 5]):
            order[beams] = order[beams][torch.randint(0, 3, (3,), generator=generator)]
        for cache in (replayed, plain):
            cache.reorder_cache(order)
        assert run.intact()
        assert all(x is y for x, y in zip(run.tensors(), before, strict=True))
        for layer in replayed.turbo_layers():
            table = layer.pool.table.on(layer.device)
            for row, reserved in enumerate(layer.pool.table.reserved):
                assert table[row, :reserved].tolist() == layer.pool.table.numbers[row, :reserved].tolist()
        if run.needs_pages():
            run.begin()
    settle(replayed)
    assert_same(replayed, plain)
    run.close()
    # pages of dropped beams have been given back
    for x, y in zip(replayed.turbo_layers(), plain.turbo_layers(), strict=True):
        assert x.pool.pages <= y.pool.pages + y.pool.pages // 32


def test_rows_of_other_lengths_end_the_steps() -> None:
    cache = filled(flat_config(block_size=32), lengths=EQUAL)
    run = ReplayableSteps(cache)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        held = [layer.buffer.k.clone() for layer in cache.turbo_layers()]
        twin.reorder_cache([1, 1, 2, 3, 4, 5])
        assert all(torch.equal(layer.buffer.k, k) for layer, k in zip(cache.turbo_layers(), held, strict=True))
        assert run.intact()
    cache.reorder_cache([2, 1, 2, 3, 4, 5])
    assert not run.intact()


def test_caches_in_one_state_have_tables_of_their_own() -> None:
    one, other = (filled(flat_config(block_size=32), lengths=EQUAL) for _ in range(2))
    run = ReplayableSteps(one)
    ReplayableSteps(other)
    tables = [layer.pool.table.on(layer.device) for layer in other.turbo_layers()]
    held = [table.clone() for table in tables]
    one.reorder_cache([1, 0, 2, 3, 4, 5])
    assert run.intact()
    for layer, table, numbers in zip(other.turbo_layers(), tables, held, strict=True):
        assert layer.pool.table.on(layer.device) is table
        assert torch.equal(table, numbers)


def test_a_copy_goes_its_own_way() -> None:
    cache = filled(flat_config(block_size=32))
    run = ReplayableSteps(cache)
    for _ in range(20):
        by_steps(run, new_tokens())
    twin, plain = copy.deepcopy(cache), copy.deepcopy(cache)
    other = ReplayableSteps(twin)
    assert not {id(x) for x in run.tensors()} & {id(x) for x in other.tensors() if isinstance(x, Tensor)}
    for _ in range(50):
        new = new_tokens()
        by_steps(other, new)
        by_steps(run, new_tokens())
        by_host(plain, new)
    settle(twin)
    assert_same(twin, plain)


def test_a_token_whose_bucket_is_not_known_is_noted_as_such() -> None:
    cache = filled(flat_config(block_size=32, sparse=KMEANS))
    run = ReplayableSteps(cache)
    run.mark_unfinished()
    with run.running():
        for layer, (k, v) in zip(run.layers, new_tokens(), strict=True):
            layer.append(k, v, NewColumns(1))
    run.finish()
    for layer in run.layers:
        for row, length in enumerate(LENGTHS):
            assert (layer.bucket_index.buckets[row, ..., length] == -1).all()
            assert (layer.bucket_index.buckets[row, ..., :length] >= 0).all()


@pytest.mark.parametrize("change", [TurboCache.reset, TurboCache.activate_past_recording])
def test_a_reset_and_recording_end_the_steps(change: Callable[[TurboCache], None]) -> None:
    cache = filled(flat_config(block_size=32))
    run = ReplayableSteps(cache)
    assert run.intact()
    change(cache)
    assert not run.intact()


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("host", [False, True])
def test_a_step_of_others_ends_the_steps_even_where_one_was_taken_back(host: bool, recording: bool) -> None:
    cache, new = filled(flat_config(block_size=32)), new_tokens()
    if recording:
        cache.activate_past_recording()
    run = ReplayableSteps(cache)
    by_steps(run, new)
    by_steps(run, new)
    for layer in cache.turbo_layers():
        layer.crop(-1)
    if host:
        by_host(cache, new)
    else:
        by_steps(ReplayableSteps(cache), new)
    # the same tokens in as many columns, and other counts on the device
    assert not run.intact()


def test_layers_that_hold_the_same_share_one_count() -> None:
    cache = filled(flat_config(block_size=32))
    run = ReplayableSteps(cache)
    by_steps(run, new_tokens())
    first, second = cache.turbo_layers()
    assert first.state.open is second.state.open
    assert first.state.sealed is second.state.sealed
    assert first.pool.table is second.pool.table
    first.crop(-1)
    assert second.state.open == [n + 1 for n in first.state.open]


@pytest.mark.parametrize("config", CONFIGS[3:])
def test_new_steps_of_a_cache_replace_the_earlier_ones(config: TurboConfig) -> None:
    cache = filled(config)
    earlier, plain = ReplayableSteps(cache), copy.deepcopy(cache)
    # its runner may be collected at any time: here between the layers of a step that seals
    while max(cache.turbo_layers()[0].state.open) < 32:
        by_both(earlier, plain)
    later, new = ReplayableSteps(cache), new_tokens()
    later.mark_unfinished()
    later.begin()
    with later.running():
        for layer, (k, v) in zip(later.layers, new, strict=True):
            assert not earlier.intact()
            earlier.close()
            layer.append(k, v, NewColumns(1), buckets_of(layer, k))
    later.finish()
    by_host(plain, new)
    for _ in range(40):
        by_both(later, plain)
    settle(cache)
    assert_same(cache, plain)


def test_nan_is_told_by_the_layer_before_its_block_is_sealed() -> None:
    cache = filled(flat_config(block_size=32, recent_tokens=0), lengths=[FIRST + 30])
    run = ReplayableSteps(cache)
    new = new_tokens(1)
    new[1][0][0, 1, 0, 3] = torch.nan
    by_steps(run, new)
    assert not run.seals()
    by_steps(run, new_tokens(1))
    assert run.seals()
    with pytest.raises(ValueError, match="layer 1: keys or values hold NaN or Inf"):
        run.require_finite()


def recording() -> TurboCache:
    cache = filled(TurboConfig(recent_tokens=0), lengths=[90, 33, 5])
    cache.activate_past_recording()
    for layer in cache.turbo_layers():
        layer.append(tokens(3, HEADS, 100, DIM), tokens(3, HEADS, 100, DIM), NewColumns(100))
    return cache


def with_another_layer() -> TurboCache:
    cache = filled(TurboConfig())
    cache.layers[0] = type("Other", (DynamicLayer,), {})()
    return cache


def dequantized() -> TurboCache:
    cache = filled(TurboConfig())
    cache.decompressed = True
    return cache


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(with_another_layer, "layer 0 is not compressed", id="another"),
        pytest.param(dequantized, "computed in full precision", id="dequantized"),
        pytest.param(lambda: TurboCache(LlamaConfig(**SHAPE)), "layer 0 holds no tokens", id="empty"),
        pytest.param(recording, "blocks of a prompt wait for a crop", id="recording"),
    ],
)
def test_what_cannot_be_replayed_says_why(make: Callable[[], TurboCache], reason: str) -> None:
    assert reason in str(why_no_replay(make()))


def test_a_cache_dequantized_and_emptied_is_like_a_new_one() -> None:
    cache = dequantized()
    cache.reset()
    assert "holds no tokens" in str(why_no_replay(cache))


def test_kernels_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(TurboConfig())
    for layer in cache.turbo_layers():
        layer.ops = replace(layer.ops, dtype=torch.float64)
    assert why_no_replay(cache) == "float64 has no kernel"
    monkeypatch.undo()
    assert "runs without kernels" in str(why_no_replay(filled(TurboConfig())))


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]])
def test_nothing_moves_between_two_reservations(config: TurboConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AHEAD", 2)
    run = ReplayableSteps(filled(config))
    moved, seals = 0, 0
    for _ in range(200):
        asked, before = run.needs_pages(), run.tensors()
        seals += run.seals()
        by_steps(run, new_tokens())
        same = all(a is b for a, b in zip(before, run.tensors(), strict=True))
        assert same or asked
        moved += asked
    # each of the three rows has sealed five blocks or more, at different times, two a reservation
    assert seals >= 15
    assert 2 <= moved <= 6


def test_the_index_has_room_for_the_blocks_that_are_reserved() -> None:
    cache = filled(flat_config(block_size=32, sparse=KMEANS), lengths=[70, 33])
    run = ReplayableSteps(cache)
    room = [layer.bucket_index.buckets for layer in cache.turbo_layers()]
    # 2 blocks sealed, 8 reserved, one more that is open when those are sealed; a grain is 64
    assert [x.shape[-1] for x in room] == [384, 384]
    while not run.needs_pages():
        by_steps(run, new_tokens(2))
    assert [layer.lengths() for layer in cache.turbo_layers()] == [[11 * 32, 315]] * 2
    assert all(layer.bucket_index.buckets is x for layer, x in zip(cache.turbo_layers(), room, strict=True))
    run.close()
    assert [layer.bucket_index.buckets.shape[-1] for layer in cache.turbo_layers()] == [384, 384]
    cache = filled(flat_config(block_size=32, sparse=KMEANS), lengths=[70, 33])
    plain = copy.deepcopy(cache)
    ReplayableSteps(cache).close()
    assert [layer.bucket_index.buckets.shape[-1] for layer in cache.turbo_layers()] == [128, 128]
    for layer in plain.turbo_layers():
        # steps begin with the prompt sealed
        layer.commit(whole_prompt=True)
    assert_same(cache, plain)


@pytest.mark.parametrize(
    "name", ["order", "nonfinite", "buffer.k", "pool.paged", "bucket_index.buckets", "bucket_index.spans"]
)
def test_what_launches_refer_to_is_told_when_it_is_replaced(name: str) -> None:
    cache = filled(flat_config(bits=2, block_size=32, sparse=KMEANS))
    run = ReplayableSteps(cache)
    before = run.tensors()
    assert all(map(operator.is_, before, run.tensors()))
    *path, last = name.split(".")
    owner = operator.attrgetter(*path)(cache.turbo_layers()[1]) if path else cache.turbo_layers()[1]
    setattr(owner, last, copy.deepcopy(getattr(owner, last)))
    assert not all(map(operator.is_, before, run.tensors()))


def test_pages_reserved_beyond_need_are_bounded() -> None:
    rows, config = 64, flat_config(block_size=32, recent_tokens=0)
    cache = filled(config, lengths=[FIRST + 320] * rows)
    ReplayableSteps(cache)
    for layer in cache.turbo_layers():
        assert layer.pool.pages <= 640 + max(steps.SLACK, rows, 640 // 8)
    cache = filled(config, lengths=[FIRST + 320])
    ReplayableSteps(cache)
    assert all(layer.pool.pages == 10 + steps.AHEAD for layer in cache.turbo_layers())
    # of many rows a twentieth of the pages in use, where that is more than a block a row
    rows, blocks = steps.SLACK + 1, 40
    cache = filled(config, lengths=[FIRST + 32 * blocks] * rows)
    ReplayableSteps(cache)
    assert all(layer.pool.pages == rows * (blocks + blocks // 20) for layer in cache.turbo_layers())


def test_pages_that_are_reserved_again_and_again_are_the_same() -> None:
    layer = filled(flat_config(block_size=32, recent_tokens=0)).turbo_layers()[0]
    pool, sealed = layer.pool, layer.state.sealed
    assert sealed == [1, 0, 0]
    for _ in range(50):
        pool.follow(pool.table.reserve(sealed, [8] * len(LENGTHS)))
        table = pool.table
        assert pool.pages == sum(table.reserved) == sum(sealed) + 8 * len(LENGTHS)
        owned = [page for row, count in enumerate(table.reserved) for page in table.numbers[row, :count].tolist()]
        assert sorted(owned) == list(range(pool.pages))
