"""Pages that replayed steps reserve ahead: few, used again, and where launches refer to them as long as they last."""

import copy
import operator

import pytest
from all_pairs import in_one_test
from steps_support import CONFIGS, KMEANS, LENGTHS, assert_same, by_steps, filled, new_tokens, without_kernels

from turbo_hf import TurboConfig
from turbo_hf.graphs import replayable_steps as steps
from turbo_hf.graphs.replayable_steps import ReplayableSteps


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]])
def test_nothing_moves_between_two_reservations(config: TurboConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AHEAD", 2)
    run = ReplayableSteps(filled(config), None)
    moved, seals = 0, 0
    for _ in range(200):
        asked, before = run.needs_pages(), run.tensors()
        seals += run.seals()
        by_steps(run, new_tokens())
        same = all(a is b for a, b in zip(before, run.tensors(), strict=True))
        assert same or asked
        moved += asked
    # each of the three rows has sealed six blocks or more, at different times, two a reservation
    assert seals >= 18
    assert 2 <= moved <= 6


def test_the_index_has_room_for_the_blocks_that_are_reserved() -> None:
    cache = filled(TurboConfig(block_size=32, sparse=KMEANS), lengths=[70, 33])
    run = ReplayableSteps(cache, None)
    room = [layer.bucket_index.buckets for layer in cache.turbo_layers()]
    # 2 blocks sealed, 8 reserved, one more that is open when those are sealed; a grain is 64
    assert [x.shape[-1] for x in room] == [384, 384]
    while not run.needs_pages():
        by_steps(run, new_tokens(2))
    assert [layer.lengths() for layer in cache.turbo_layers()] == [[11 * 32, 315]] * 2
    assert all(layer.bucket_index.buckets is x for layer, x in zip(cache.turbo_layers(), room, strict=True))
    run.close()
    assert [layer.bucket_index.buckets.shape[-1] for layer in cache.turbo_layers()] == [384, 384]
    cache = filled(TurboConfig(block_size=32, sparse=KMEANS), lengths=[70, 33])
    plain = copy.deepcopy(cache)
    ReplayableSteps(cache, None).close()
    assert [layer.bucket_index.buckets.shape[-1] for layer in cache.turbo_layers()] == [128, 128]
    for layer in plain.turbo_layers():
        # steps begin with the prompt sealed
        layer.commit(whole_prompt=True)
    assert_same(cache, plain)


@in_one_test(
    "name", ["order", "universal", "nonfinite", "buffer.k", "pool.paged", "bucket_index.buckets", "bucket_index.spans"]
)
def test_what_launches_refer_to_is_told_when_it_is_replaced(name: str) -> None:
    cache = filled(TurboConfig(bits=2, block_size=32, buffer_scale="universal", sparse=KMEANS))
    run = ReplayableSteps(cache, None)
    before = run.tensors()
    assert all(map(operator.is_, before, run.tensors()))
    *path, last = name.split(".")
    owner = operator.attrgetter(*path)(cache.turbo_layers()[1]) if path else cache.turbo_layers()[1]
    setattr(owner, last, copy.deepcopy(getattr(owner, last)))
    assert not all(map(operator.is_, before, run.tensors()))


def test_pages_reserved_beyond_need_are_bounded() -> None:
    rows = 64
    cache = filled(TurboConfig(block_size=32), lengths=[320] * rows)
    ReplayableSteps(cache, None)
    for layer in cache.turbo_layers():
        assert layer.pool.pages <= 640 + max(steps.SLACK, rows, 640 // 8)
    cache = filled(TurboConfig(block_size=32), lengths=[320] * rows)
    ReplayableSteps(cache, 330)
    for layer in cache.turbo_layers():
        assert layer.pool.pages == 640
    # a limit that leaves out what the cache held before says nothing
    cache = filled(TurboConfig(block_size=32), lengths=[320])
    ReplayableSteps(cache, 100)
    assert all(layer.pool.pages == 10 + steps.AHEAD for layer in cache.turbo_layers())
    # of many rows a twentieth of the pages in use, where that is more than a block a row
    rows, blocks = steps.SLACK + 1, 40
    cache = filled(TurboConfig(block_size=32), lengths=[32 * blocks] * rows)
    ReplayableSteps(cache, None)
    assert all(layer.pool.pages == rows * (blocks + blocks // 20) for layer in cache.turbo_layers())


def test_pages_that_are_reserved_again_and_again_are_the_same() -> None:
    layer = filled(TurboConfig(block_size=32)).turbo_layers()[0]
    pool, sealed = layer.pool, layer.state.sealed
    assert sealed == [2, 1, 0]
    for _ in range(50):
        pool.reserve(sealed, [8] * len(LENGTHS))
        assert pool.pages == sum(pool.reserved) == sum(sealed) + 8 * len(LENGTHS)
        owned = [page for row, count in enumerate(pool.reserved) for page in pool.table[row, :count].tolist()]
        assert sorted(owned) == list(range(pool.pages))
