"""Steps that can be replayed store, bit by bit, what the host's own path stores, and leave a cache that goes on."""

import copy
import operator
from collections.abc import Callable

import pytest
import torch
from models import SHAPE
from stores import tokens
from torch import Tensor
from transformers import LlamaConfig

from turbo_hf import SparseConfig, TurboCache, TurboConfig, steps
from turbo_hf.chunk import Chunk, chunk_of
from turbo_hf.layer import TurboLayer
from turbo_hf.selectors import Centroids, Reformer
from turbo_hf.steps import Steps, obstacle

HEADS, DIM, LAYERS = 2, 16, 2
LENGTHS = [70, 33, 5]
KMEANS = SparseConfig(selector="kmeans-rotated", probes=2)
CONFIGS = [
    pytest.param(TurboConfig(block_size=32), id="4bit"),
    pytest.param(TurboConfig(bits=8, block_size=32), id="8bit"),
    pytest.param(TurboConfig(block_size=32, int8_layers=(1,)), id="4bit-8bit"),
    pytest.param(TurboConfig(bits=2, block_size=32, buffer_scale="universal"), id="2bit-universal"),
    pytest.param(TurboConfig(block_size=32, sparse=KMEANS), id="sparse"),
]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by the references: what is counted and kept in place is the same, and takes no interpreter."""
    monkeypatch.setattr(TurboLayer, "appends_in_place", lambda layer: layer.seen > 0)


def filled(config: TurboConfig, window: int | None = None, lengths: list[int] | None = None) -> TurboCache:
    """A left-padded batch in a cache of two layers."""
    lengths = LENGTHS if lengths is None else lengths
    shape = {**SHAPE, "num_hidden_layers": LAYERS}
    generator = torch.Generator().manual_seed(3)
    centroids = torch.randn(HEADS, 8, DIM, generator=generator)
    selectors = {
        n: Centroids(KMEANS, n, centroids, pre_rotary=False) for n in range(LAYERS) if config.sparse is not None
    }
    orders = {n: [1, 0] for n in range(LAYERS)}
    cache = TurboCache(LlamaConfig(**shape), config, head_orders=orders, selectors=selectors)
    chunk = chunk_of(torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None])
    for layer in cache.turbo_layers():
        layer.window = window
        k, v = (torch.randn(len(lengths), HEADS, max(lengths), DIM, generator=generator) for _ in range(2))
        layer.append(k, v, chunk, buckets_of(layer, k))
        layer.commit()
    return cache


def buckets_of(layer: TurboLayer, k: Tensor) -> Tensor | None:
    return None if layer.selector is None else layer.selector.buckets(k)


def new_tokens(rows: int = len(LENGTHS)) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of one more token for each layer."""
    return [(tokens(rows, HEADS, 1, DIM), tokens(rows, HEADS, 1, DIM)) for _ in range(LAYERS)]


def by_host(cache: TurboCache, new: list[tuple[Tensor, Tensor]]) -> None:
    for layer, (k, v) in zip(cache.turbo_layers(), new, strict=True):
        layer.append(k, v, Chunk(1), buckets_of(layer, k))
        layer.commit()


def by_steps(run: Steps, new: list[tuple[Tensor, Tensor]]) -> None:
    run.begin()
    with run.running():
        for layer, (k, v) in zip(run.layers, new, strict=True):
            layer.append(k, v, Chunk(1), buckets_of(layer, k))
            layer.commit()
    run.finish()


def settle(cache: TurboCache) -> None:
    """What any other pass does first: seal what steps have left full."""
    for layer in cache.turbo_layers():
        layer.check(torch.empty(layer.rows, layer.heads, 1, layer.dim))


def assert_same(a: TurboCache, b: TurboCache) -> None:
    """The same tokens, bit by bit, in as many columns; and the device knows the lengths that the host does."""
    for x, y in zip(a.turbo_layers(), b.turbo_layers(), strict=True):
        assert x.seen == y.seen
        assert x.lengths() == y.lengths()
        assert (x.valid is None) == (y.valid is None)
        if x.valid is not None and y.valid is not None:
            assert torch.equal(x.valid, y.valid)
        for layer in (x, y):
            store = layer.store()
            assert store.open_len.tolist() == layer.buffer.length
            assert store.sealed.tolist() == list(layer.pool.sealed)
        for p, q in zip(x.dense(x.seen), y.dense(y.seen), strict=True):
            assert torch.equal(p, q)
        for row, length in enumerate(x.lengths() if x.bucket_index.tables else []):
            p, q = (layer.bucket_index.buckets[row, ..., :length] for layer in (x, y))
            assert torch.equal(p, q)


@pytest.mark.parametrize("limit", [None, 175], ids=["open-end", "limit"])
@pytest.mark.parametrize("config", CONFIGS)
def test_steps_store_what_the_host_stores(config: TurboConfig, limit: int | None) -> None:
    replayed, plain = filled(config), filled(config)
    run = Steps(replayed, limit)
    for _ in range(105):
        new = new_tokens()
        by_host(plain, new)
        assert run.intact()
        by_steps(run, new)
    settle(replayed)
    assert [layer.pool.sealed for layer in replayed.turbo_layers()] == [
        layer.pool.sealed for layer in plain.turbo_layers()
    ]
    assert_same(replayed, plain)


def test_mixed_widths_and_an_order_of_heads() -> None:
    config = TurboConfig(block_size=32, low_heads=0.5)
    replayed, plain = filled(config), filled(config)
    run = Steps(replayed, None)
    for _ in range(70):
        new = new_tokens()
        by_host(plain, new)
        by_steps(run, new)
    settle(replayed)
    assert_same(replayed, plain)


def test_a_window_drops_its_blocks_when_pages_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AHEAD", 2)
    replayed, plain = filled(TurboConfig(block_size=32), window=40), filled(TurboConfig(block_size=32), window=40)
    run = Steps(replayed, None)
    for _ in range(230):
        new = new_tokens()
        by_host(plain, new)
        by_steps(run, new)
        for layer in replayed.turbo_layers():
            # what the window needs, the block being filled, and as much as is reserved at a time
            assert max(layer.lengths()) <= 40 + 32 + 3 * 32
    for cache in (replayed, plain):
        for layer in cache.turbo_layers():
            assert layer.dense(39)[0].any(-1).all()
    for x, y in zip(replayed.turbo_layers(), plain.turbo_layers(), strict=True):
        for p, q in zip(x.dense(39), y.dense(39), strict=True):
            assert torch.equal(p, q)
        # pages are used again: no more than are held and reserved
        assert x.pool.pages <= 3 * 8


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]])
def test_nothing_moves_between_two_reservations(config: TurboConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AHEAD", 2)
    run = Steps(filled(config), None)
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
    config = TurboConfig(block_size=32, low_heads=0.5, sparse=KMEANS)
    replayed, plain = filled(config), filled(config)
    run = Steps(replayed, None)
    for _ in range(2):
        for _ in range(count):
            new = new_tokens(replayed.turbo_layers()[0].rows)
            by_host(plain, new)
            by_steps(run, new)
        settle(replayed)
        for cache in (replayed, plain):
            torch.manual_seed(7)
            change(cache)
        assert not run.intact()
        assert_same(replayed, plain)
        assert obstacle(replayed) is None
        run = Steps(replayed, None)


def test_a_copy_goes_its_own_way() -> None:
    cache = filled(TurboConfig(block_size=32))
    run = Steps(cache, None)
    for _ in range(20):
        by_steps(run, new_tokens())
    twin, plain = copy.deepcopy(cache), copy.deepcopy(cache)
    other = Steps(twin, None)
    assert not {id(x) for x in run.tensors()} & {id(x) for x in other.tensors() if isinstance(x, Tensor)}
    for _ in range(50):
        new = new_tokens()
        by_steps(other, new)
        by_steps(run, new_tokens())
        by_host(plain, new)
    settle(twin)
    assert_same(twin, plain)


def test_the_index_has_room_for_the_blocks_that_are_reserved() -> None:
    cache = filled(TurboConfig(block_size=32, sparse=KMEANS), lengths=[70, 33])
    run = Steps(cache, None)
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
    Steps(cache, None).close()
    assert [layer.bucket_index.buckets.shape[-1] for layer in cache.turbo_layers()] == [128, 128]
    for layer in plain.turbo_layers():
        # steps begin with the prompt sealed
        layer.commit(whole_prompt=True)
    assert_same(cache, plain)


def test_a_token_whose_bucket_is_not_known_is_noted_as_such() -> None:
    cache = filled(TurboConfig(block_size=32, sparse=KMEANS))
    run = Steps(cache, None)
    with run.running():
        for layer, (k, v) in zip(run.layers, new_tokens(), strict=True):
            layer.append(k, v, Chunk(1))
    run.finish()
    for layer in run.layers:
        for row, length in enumerate(LENGTHS):
            assert (layer.bucket_index.buckets[row, ..., length] == -1).all()
            assert (layer.bucket_index.buckets[row, ..., :length] >= 0).all()


def test_a_reset_ends_the_steps() -> None:
    cache = filled(TurboConfig())
    run = Steps(cache, None)
    cache.reset()
    assert not run.intact()
    assert "holds no tokens" in str(obstacle(cache))


def test_recording_of_the_past_ends_the_steps() -> None:
    cache = filled(TurboConfig(block_size=32))
    run = Steps(cache, None)
    assert run.intact()
    cache.activate_past_recording()
    assert not run.intact()


@pytest.mark.parametrize(
    "name", ["order", "universal", "nonfinite", "buffer.k", "pool.paged", "bucket_index.buckets", "bucket_index.spans"]
)
def test_what_launches_refer_to_is_told_when_it_is_replaced(name: str) -> None:
    cache = filled(TurboConfig(bits=2, block_size=32, buffer_scale="universal", sparse=KMEANS))
    run = Steps(cache, None)
    before = run.tensors()
    assert all(map(operator.is_, before, run.tensors()))
    *path, last = name.split(".")
    owner = operator.attrgetter(*path)(cache.turbo_layers()[1]) if path else cache.turbo_layers()[1]
    setattr(owner, last, copy.deepcopy(getattr(owner, last)))
    assert not all(map(operator.is_, before, run.tensors()))


def test_layers_that_hold_the_same_share_one_count() -> None:
    cache = filled(TurboConfig(block_size=32))
    run = Steps(cache, None)
    by_steps(run, new_tokens())
    first, second = cache.turbo_layers()
    assert first.buffer.length is second.buffer.length
    assert first.pool.sealed is second.pool.sealed
    first.crop(-1)
    assert second.buffer.length == [n + 1 for n in first.buffer.length]


@pytest.mark.parametrize("config", CONFIGS[3:])
def test_later_steps_of_a_cache_are_the_only_ones(config: TurboConfig) -> None:
    cache = filled(config)
    earlier, plain = Steps(cache, None), copy.deepcopy(cache)
    # its runner may be collected at any time: here between the layers of a step that seals
    while max(cache.turbo_layers()[0].buffer.length) < 32:
        new = new_tokens()
        by_steps(earlier, new)
        by_host(plain, new)
    later, new = Steps(cache, None), new_tokens()
    later.begin()
    with later.running():
        for layer, (k, v) in zip(later.layers, new, strict=True):
            assert not earlier.intact()
            earlier.close()
            layer.append(k, v, Chunk(1), buckets_of(layer, k))
    later.finish()
    by_host(plain, new)
    for _ in range(40):
        new = new_tokens()
        by_steps(later, new)
        by_host(plain, new)
    settle(cache)
    assert_same(cache, plain)


@pytest.mark.parametrize("before", [20, 27], ids=["open", "seals"])
def test_a_step_that_is_broken_off_is_counted_where_it_was_stored(before: int) -> None:
    cache = filled(TurboConfig(block_size=32))
    run, plain = Steps(cache, None), copy.deepcopy(cache)
    for _ in range(before):
        new = new_tokens()
        by_steps(run, new)
        by_host(plain, new)
    first, new = cache.turbo_layers()[0], new_tokens()
    run.begin()
    with run.running():
        first.append(*new[0], Chunk(1))
    run.recount()
    assert not run.intact()
    assert obstacle(cache) == f"layer 1 holds {70 + before} columns, and the first layer {71 + before}"
    first.crop(-1)
    assert obstacle(cache) is None
    settle(cache)
    assert_same(cache, plain)


def test_nan_is_told_by_the_layer_before_its_block_is_sealed() -> None:
    cache = filled(TurboConfig(block_size=32), lengths=[30])
    run = Steps(cache, None)
    new = new_tokens(1)
    new[1][0][0, 1, 0, 3] = torch.nan
    by_steps(run, new)
    assert not run.seals()
    by_steps(run, new_tokens(1))
    assert run.seals()
    with pytest.raises(ValueError, match="layer 1: keys or values hold NaN or Inf"):
        run.require_finite()


def short_prompt(config: TurboConfig) -> TurboCache:
    cache = TurboCache(LlamaConfig(**SHAPE), config)
    for layer in cache.turbo_layers():
        layer.append(tokens(1, HEADS, 5, DIM), tokens(1, HEADS, 5, DIM), Chunk(5))
    return cache


def recording() -> TurboCache:
    cache = filled(TurboConfig())
    cache.activate_past_recording()
    return cache


def with_dense_layer() -> TurboCache:
    return TurboCache(LlamaConfig(**SHAPE), TurboConfig(dense_layers=(0,)))


def sparse() -> TurboCache:
    cache = filled(TurboConfig())
    cache.turbo_layers()[1].selector = Reformer(SparseConfig(selector="lsh-reformer"), 1)
    return cache


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(with_dense_layer, "layer 0 is not compressed", id="dense"),
        pytest.param(lambda: TurboCache(LlamaConfig(**SHAPE)), "layer 0 holds no tokens", id="empty"),
        pytest.param(recording, "blocks wait for a crop", id="recording"),
        pytest.param(lambda: short_prompt(TurboConfig(low_heads=0.5)), "heads without a rank", id="unranked"),
        pytest.param(sparse, 'layer 1 is sparse: selector "lsh-reformer" draws numbers on the host', id="sparse"),
        pytest.param(lambda: filled(TurboConfig(sas=True)), "SAS threshold follows the length", id="sas"),
    ],
)
def test_what_cannot_be_replayed_says_why(make: Callable[[], TurboCache], reason: str) -> None:
    assert reason in str(obstacle(make()))


def test_kernels_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(TurboConfig())
    monkeypatch.undo()
    assert "runs without kernels" in str(obstacle(cache))
    monkeypatch.setattr(TurboLayer, "appends_in_place", lambda layer: True)
    for layer in cache.turbo_layers():
        layer.dtype = torch.float64
    assert obstacle(cache) == "float64 has no kernel"


def test_slack_is_bounded() -> None:
    rows = 64
    cache = filled(TurboConfig(block_size=32), lengths=[320] * rows)
    Steps(cache, None)
    for layer in cache.turbo_layers():
        assert layer.pool.pages <= 640 + max(steps.SLACK, rows, 640 // 8)
    cache = filled(TurboConfig(block_size=32), lengths=[320] * rows)
    Steps(cache, 330)
    for layer in cache.turbo_layers():
        assert layer.pool.pages == 640
    # a limit that leaves out what the cache held before says nothing
    cache = filled(TurboConfig(block_size=32), lengths=[320])
    Steps(cache, 100)
    assert all(layer.pool.pages == 10 + steps.AHEAD for layer in cache.turbo_layers())
    # of many rows a twentieth of the pages in use, where that is more than a block a row
    rows, blocks = steps.SLACK + 1, 40
    cache = filled(TurboConfig(block_size=32), lengths=[32 * blocks] * rows)
    Steps(cache, None)
    assert all(layer.pool.pages == rows * (blocks + blocks // 20) for layer in cache.turbo_layers())


def test_pages_that_are_reserved_again_and_again_are_the_same() -> None:
    pool = filled(TurboConfig(block_size=32)).turbo_layers()[0].pool
    assert pool.sealed == [2, 1, 0]
    for _ in range(50):
        pool.reserve([8] * len(LENGTHS))
        assert pool.pages == sum(pool.reserved) == sum(pool.sealed) + 8 * len(LENGTHS)
        owned = [page for row, count in enumerate(pool.reserved) for page in pool.table[row, :count].tolist()]
        assert sorted(owned) == list(range(pool.pages))
