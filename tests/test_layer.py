"""The cache layer against a naive model of it: one Python list of tokens a row, no batch, no pool, no tables."""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefill_support import int8_queries
from support import check_exact, check_turbo, largest, page_codes, store_codes
from torch import Tensor

from turbo_hf.chunk import Chunk, chunk_from_mask, chunk_of
from turbo_hf.config import TurboConfig
from turbo_hf.layer import DECODE_TOKENS, TurboLayer
from turbo_hf.layout import CODE_MAX, KVStore, PagedHeads, open_token_bytes, page_bytes
from turbo_hf.ops.decode import decode
from turbo_hf.ops.quantize import head_scores, quantize_tokens, seal_blocks
from turbo_hf.ops.rotate import rotate_keys, unrotate_keys
from turbo_hf.pages import PagePool

CONFIGS = [
    pytest.param(TurboConfig(bits=8), id="8bit"),
    pytest.param(TurboConfig(bits=4), id="4bit"),
    pytest.param(TurboConfig(bits=3), id="3bit"),
    pytest.param(TurboConfig(bits=2), id="2bit"),
    pytest.param(TurboConfig(bits=4, low_bits=2, low_heads=0.5), id="mixed"),
    pytest.param(TurboConfig(bits=8, low_bits=3, low_heads=0.5, head_metric="entropy", block_size=32), id="mixed8-3"),
    pytest.param(TurboConfig(bits=4, block_size=32), id="block32"),
    pytest.param(TurboConfig(bits=4, block_size=128), id="block128"),
]
HEADS = 3
"""Three, so that an order of heads differs from its inverse."""


# --- the naive model -----------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """One INT8 token. k, v: int8 [Hkv, D]; k_scale, v_scale: float32 [Hkv]."""

    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor


class NaiveRow:
    """One row: a list of columns, a list of sealed blocks, a list of open tokens."""

    def __init__(self, config: TurboConfig, window: int | None = None):
        self.config, self.window = config, window
        self.columns: list[bool] = []
        self.pages: list[list[PagedHeads]] = []
        self.open: list[Token] = []
        self.order: list[int] | None = None
        self.dropped = 0

    def append(self, k: Tensor, v: Tensor, valid: Iterable[bool]) -> None:
        """Columns k, v [Hkv, M, D], of which those under `valid` are tokens."""
        k = rotate_keys(k[None])[0] if self.config.rotates else k
        for column, real in enumerate(valid):
            self.columns.append(real)
            if real:
                codes = [quantize_tokens(x[None, :, column : column + 1]) for x in (k, v)]
                self.open.append(Token(*(x[0, :, 0] for pair in codes for x in pair)))

    def commit(self) -> None:
        """Seal whole blocks, one after the other; then drop those that no later query sees."""
        block = self.config.block_size
        while len(self.open) >= block:
            k, k_scale, v, v_scale = (torch.stack(x, 1) for x in zip(*self.open[:block], strict=True))
            self.open = self.open[block:]
            groups = self.config.head_groups(k.shape[0])
            if self.order is None:
                keys, values = ((x * scale[..., None])[None] for x, scale in ((k, k_scale), (v, v_scale)))
                keys = unrotate_keys(keys) if self.config.rotates else keys
                score = head_scores(keys, values, self.config.head_metric)
                ranked = sorted(range(k.shape[0]), key=lambda head: -float(score[0, head]))
                self.order = ranked if len(groups) > 1 else list(range(k.shape[0]))
            page, slot = [], 0
            for bits, count in groups:
                own = self.order[slot : slot + count]
                page.append(seal_blocks(k[own][None], k_scale[own][None], v[own][None], v_scale[own][None], bits))
                slot += count
            self.pages.append(page)
        while self.window is not None and self.held() - block >= self.window - 1:
            del self.pages[0]
            self.dropped += block

    def held(self) -> int:
        """Tokens that the row can still give."""
        return len(self.pages) * self.config.block_size + len(self.open)

    def can_crop(self, columns: int) -> bool:
        """Whether the window is still whole with the newest `columns` columns gone."""
        gone = sum(self.columns[len(self.columns) - columns :])
        visible = self.held() + self.dropped - gone
        if self.window is not None:
            visible = min(visible, self.window - 1)
        return self.held() - gone >= visible

    def crop(self, columns: int) -> None:
        """Take columns off one by one; a sealed block that is reached becomes open tokens first."""
        for _ in range(columns):
            if not self.columns.pop():
                continue
            if not self.open:
                self.open = self.tokens(self.pages.pop())
                if not self.pages and not self.dropped:
                    self.order = None if len(self.config.head_groups(HEADS)) > 1 else self.order
            self.open.pop()

    def tokens(self, page: list[PagedHeads]) -> list[Token]:
        """The INT8 tokens that a sealed block stands for."""
        assert self.order is not None
        slots = [(pages, slot) for pages in page for slot in range(pages.k.shape[1])]
        by_head = sorted(zip(self.order, slots, strict=True), key=lambda pair: pair[0])
        codes = [page_codes(pages, 0, slot) for _, (pages, slot) in by_head]
        scales = [pages.scale[0, slot] for _, (pages, slot) in by_head]
        k, v = (torch.stack(x).to(torch.int8) for x in zip(*codes, strict=True))
        k_scale, v_scale = torch.stack(scales).unbind(-1)
        return [Token(k[:, n], k_scale, v[:, n], v_scale) for n in range(k.shape[1])]

    def values(self, columns: int, dim: int) -> tuple[Tensor, Tensor]:
        """Dequantised keys and values [Hkv, columns, D] of the newest columns, 0 at padding and what was dropped."""
        held = [token for page in self.pages for token in self.tokens(page)] + self.open
        k, v = torch.zeros(2, HEADS, len(self.columns), dim)
        place = -self.dropped
        for column, real in enumerate(self.columns):
            if real and place >= 0:
                token = Token(*(x.cpu() for x in held[place]))
                k[:, column] = token.k * token.k_scale[:, None]
                v[:, column] = token.v * token.v_scale[:, None]
            place += real
        first = len(self.columns) - columns
        k = unrotate_keys(k[None])[0] if self.config.rotates else k
        return k[:, first:], v[:, first:]


def assert_row(store: KVStore, row: int, want: NaiveRow) -> None:
    """The row of the cache is, bit by bit, the naive row."""
    assert int(store.sealed[row]) == len(want.pages)
    assert int(store.open_len[row]) == len(want.open)
    for n, page in enumerate(want.pages):
        at = store.table[row, n]
        for got, expected in zip(store.heads, page, strict=True):
            assert got.bits == expected.bits
            for name in ("k", "v", "meta", "scale"):
                assert torch.equal(getattr(got, name)[at].cpu(), getattr(expected, name)[0].cpu()), (name, n)
    if want.pages:
        assert store.order[row].tolist() == want.order
    if want.open:
        count = len(want.open)
        k, k_scale, v, v_scale = (torch.stack(x, 1).cpu() for x in zip(*want.open, strict=True))
        assert torch.equal(store.k_open[row, :, :count].cpu(), k)
        assert torch.equal(store.v_open[row, :, :, :count].mT.cpu(), v)
        assert torch.equal(store.k_scale[row, :, :count].cpu(), k_scale)
        assert torch.equal(store.v_scale[row, :, :count].cpu(), v_scale)


def assert_layer(layer: TurboLayer, want: list[NaiveRow]) -> None:
    """The layer is, bit by bit, the naive rows; what it says of itself and what it dequantises too."""
    store = layer.store()
    assert layer.rows == len(want)
    assert layer.get_seq_length() == layer.seen == len(want[0].columns)
    assert layer.lengths() == [row.held() for row in want]
    assert layer.dropped == [row.dropped for row in want]
    if layer.columns is None:
        assert all(all(row.columns) for row in want)
    else:
        assert layer.columns.tolist() == [row.columns for row in want]
    past = layer.seen if layer.window is None else min(layer.seen, layer.window - 1)
    assert layer.get_mask_sizes(3) == (past + 3, layer.seen - past)
    dense = layer.dense(past)
    for number, row in enumerate(want):
        assert_row(store, number, row)
        for got, expected in zip(dense, row.values(past, layer.dim), strict=True):
            assert torch.equal(got[number].cpu(), expected)


def assert_same_rows(a: TurboLayer, row_a: int, b: TurboLayer, row_b: int) -> None:
    """A row of one layer is, bit by bit, a row of another."""
    x, y = a.store(), b.store()
    assert x.sealed[row_a] == y.sealed[row_b]
    assert x.open_len[row_a] == y.open_len[row_b]
    sealed, count = int(x.sealed[row_a]), int(x.open_len[row_a])
    if sealed:
        assert torch.equal(x.order[row_a], y.order[row_b])
    for one, other in zip(x.heads, y.heads, strict=True):
        for name in ("k", "v", "meta", "scale"):
            own = getattr(one, name)[x.table[row_a, :sealed]]
            assert torch.equal(own, getattr(other, name)[y.table[row_b, :sealed]]), name
    for name, end in (("k_open", 2), ("k_scale", 2), ("v_open", 3), ("v_scale", 2)):
        own = getattr(x, name)[row_a].narrow(end - 1, 0, count)
        assert torch.equal(own, getattr(y, name)[row_b].narrow(end - 1, 0, count)), name


# --- helpers -------------------------------------------------------------------------------------------------------


def random_kv(rows: int, tokens: int, dim: int = 16, heads: int = HEADS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, heads, tokens, dim] whose channels, heads and tokens differ in size."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, rows, heads, tokens, dim, generator=generator)
    size = torch.rand(2, rows, heads, tokens, 1, generator=generator) * torch.rand(dim, generator=generator) * 4
    return k * size[0], v * size[1]


def feed(layer: TurboLayer, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
    """One pass, as the attention function does it: append aligned tokens, then commit."""
    chunk = Chunk(k.shape[2]) if valid is None else chunk_of(valid)
    layer.append(chunk.align(k), chunk.align(v), chunk)
    layer.commit()


def filled(
    config: TurboConfig, k: Tensor, v: Tensor, valid: Tensor | None = None, window: int | None = None
) -> TurboLayer:
    """A layer that took all columns in one pass."""
    layer = TurboLayer(config, window)
    feed(layer, k, v, valid)
    return layer


def tensors_of(thing: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that can be reached from an object through attributes, containers and dicts."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        parts = list(thing)
    elif hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    return [tensor for part in parts for tensor in tensors_of(part, seen)]


def allocated(layer: TurboLayer) -> int:
    """Bytes of the storages behind a layer, each counted once; of the host's table, what a device would hold."""
    table, _, _ = layer.pool.device_table(), layer.pool.device_sealed(), layer.buffer.device_length()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(layer)}
    for x in (layer.pool.table, table):
        storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values()) + table.nbytes


# --- what is stored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dim", [16, 48, 128])
def test_one_pass_stores_the_naive_rows(config: TurboConfig, dim: int, device: torch.device, poison: None) -> None:
    k, v = (x.to(device) for x in random_kv(2, 150, dim))
    want = [NaiveRow(config) for _ in range(2)]
    for row, naive in enumerate(want):
        naive.append(k[row], v[row], [True] * 150)
        naive.commit()
    assert_layer(filled(config, k, v), want)


@pytest.mark.parametrize("config", CONFIGS)
@given(data=st.data())
@settings(max_examples=10)
def test_chunks_store_what_one_pass_stores(config: TurboConfig, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.sampled_from([1, 1, 2, 15, 16, 17, 31, 63, 64, 65, 100]), min_size=1, max_size=8))
    dim = data.draw(st.sampled_from([16, 64]))
    window = data.draw(st.sampled_from([None, 1, 20, 64, 100]))
    k, v = random_kv(2, sum(cuts), dim)
    chunked, at = TurboLayer(config, window), 0
    for tokens in cuts:
        feed(chunked, k[:, :, at : at + tokens], v[:, :, at : at + tokens])
        at += tokens
    whole = filled(config, k, v, window=window)
    assert chunked.dropped == whole.dropped
    for row in range(2):
        assert_same_rows(chunked, row, whole, row)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("window", [None, 50], ids=["full", "window"])
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 1e30], ids=["nan", "inf", "huge"])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_rows_of_a_padded_batch_are_what_they_are_alone(
    config: TurboConfig, window: int | None, junk: float, side: str, poison: None
) -> None:
    columns, lengths = 200, [200, 137, 64, 1, 0]
    k, v = random_kv(len(lengths), columns)
    valid = torch.zeros(len(lengths), columns, dtype=torch.bool)
    for row, length in enumerate(lengths):
        places = torch.arange(columns)
        if side == "holes":
            places = torch.randperm(columns)[:length].sort().values
        valid[row, {"left": places[columns - length :], "right": places[:length], "holes": places}[side]] = True
    dirty = [x.masked_fill(~valid[:, None, :, None], junk) for x in (k, v)]
    batch = TurboLayer(config, window)
    # two passes, so that the second meets rows of different length
    feed(batch, dirty[0][:, :, :150], dirty[1][:, :, :150], valid[:, :150])
    feed(batch, dirty[0][:, :, 150:], dirty[1][:, :, 150:], valid[:, 150:])
    assert batch.seen == columns
    for row, length in enumerate(lengths):
        if length:
            alone = TurboLayer(config, window)
            for at in (slice(0, 150), slice(150, columns)):
                real = valid[row, at]
                if real.any():
                    feed(alone, k[row : row + 1, :, at][:, :, real], v[row : row + 1, :, at][:, :, real])
            assert_same_rows(batch, row, alone, 0)
            assert batch.dropped[row] == alone.dropped[0]
        else:
            assert batch.lengths()[row] == 0


def test_a_long_prompt_is_sealed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = random_kv(3, 300)
    valid = torch.arange(300) >= torch.tensor([[0], [77], [200]])
    config = TurboConfig(low_heads=0.5)
    whole = filled(config, k, v, valid)
    for blocks in (1, 3):
        monkeypatch.setattr("turbo_hf.reference.append.SEAL_ELEMENTS", blocks * HEADS * 64 * 16)
        parts = filled(config, k, v, valid)
        for row in range(3):
            assert_same_rows(parts, row, whole, row)


def test_a_half_precision_cache_is_that_of_the_same_numbers_in_float32() -> None:
    k, v = (x.to(torch.bfloat16) for x in random_kv(1, 100))
    half, single = filled(TurboConfig(), k, v), filled(TurboConfig(), k.float(), v.float())
    assert_same_rows(half, 0, single, 0)
    assert half.dense(100)[0].dtype == torch.bfloat16


def test_the_first_block_ranks_the_heads_of_each_row(device: torch.device) -> None:
    k, v = (x.to(device) for x in random_kv(2, 128, heads=4))
    # in row 0 head 3 has by far the widest channels, in row 1 head 0; the second block says the opposite
    for row, head, other in ((0, 3, 0), (1, 0, 3)):
        k[row, head, :64, 0] *= 50
        k[row, other, 64:, 0] *= 5000
    config = TurboConfig(bits=4, low_bits=2, low_heads=0.75)
    layer = filled(config, k, v)
    assert [pages.bits for pages in layer.store().heads] == [4, 2]
    assert layer.store().order[:, 0].tolist() == [3, 0]


# --- a random life, against the naive model ------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Random sequences of what Transformers does to a cache layer."""

    layer: TurboLayer
    naive: list[NaiveRow]

    @initialize(
        config=st.sampled_from(
            [
                TurboConfig(bits=4, block_size=32),
                TurboConfig(bits=4, low_bits=2, low_heads=0.5, block_size=32),
                TurboConfig(bits=8, block_size=64),
                TurboConfig(bits=3, low_bits=2, low_heads=0.5, block_size=64),
            ]
        ),
        window=st.sampled_from([None, None, 1, 20, 33, 70]),
        rows=st.integers(1, 3),
    )
    def begin(self, config: TurboConfig, window: int | None, rows: int) -> None:
        self.layer, self.window, self.passes, self.recording = TurboLayer(config, window), window, 0, False
        self.naive = [NaiveRow(config, window) for _ in range(rows)]

    @rule(
        tokens=st.sampled_from([1, 1, 2, 15, 16, 17, 32, 33, 64, 65, 90]),
        padding=st.sampled_from(["none", "none", "left", "right", "holes"]),
    )
    def append(self, tokens: int, padding: str) -> None:
        self.passes += 1
        rows = len(self.naive)
        k, v = random_kv(rows, tokens, seed=self.passes)
        generator = torch.Generator().manual_seed(self.passes)
        valid = torch.rand(rows, tokens, generator=generator) < 0.7
        if padding != "holes":
            valid = valid.sort(-1, descending=padding == "right").values
        if padding == "none":
            valid = torch.ones_like(valid)
        feed(self.layer, k, v, None if padding == "none" else valid)
        for row, naive in enumerate(self.naive):
            naive.append(k[row], v[row], valid[row].tolist())
            if not self.recording:
                naive.commit()

    @precondition(lambda self: self.layer.seen)
    @rule(columns=st.sampled_from([0, 0, 1, 2, 7, 16, 31, 32, 33, 64, 65, 100, 1000]))
    def crop(self, columns: int) -> None:
        if columns > self.layer.seen:
            with pytest.raises(ValueError, match=f"holds only {self.layer.seen} columns"):
                self.layer.crop(-columns)
        elif all(row.can_crop(columns) for row in self.naive):
            self.layer.crop(-columns)
            for row in self.naive:
                row.crop(columns)
                row.commit()
        else:
            with pytest.raises(ValueError, match="left the sliding window"):
                self.layer.crop(-columns)

    @rule()
    def record(self) -> None:
        self.layer.activate_past_recording()
        self.recording = True

    @precondition(lambda self: self.layer.seen)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = len(self.naive)
        index = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        self.layer.reorder_cache(torch.tensor(index))
        self.naive = [copy.deepcopy(self.naive[row]) for row in index]

    @precondition(lambda self: self.layer.seen)
    @rule(data=st.data(), as_mask=st.booleans())
    def select(self, data: st.DataObject, as_mask: bool) -> None:
        index = sorted(data.draw(st.sets(st.integers(0, len(self.naive) - 1), min_size=1)))
        chosen = torch.tensor(index)
        if as_mask:
            chosen = torch.tensor([row in index for row in range(len(self.naive))])
        self.layer.batch_select_indices(chosen)
        self.naive = [self.naive[row] for row in index]

    @precondition(lambda self: self.layer.seen and len(self.naive) < 3)
    @rule()
    def repeat(self) -> None:
        self.layer.batch_repeat_interleave(2)
        self.naive = [copy.deepcopy(row) for row in self.naive for _ in range(2)]

    @precondition(lambda self: self.layer.seen)
    @rule()
    def continue_a_copy(self) -> None:
        original, self.layer = self.layer, copy.deepcopy(self.layer)
        original.activate_past_recording()
        original.crop(0)
        original.append(*random_kv(len(self.naive), 1, seed=99), Chunk(1))

    @precondition(lambda self: self.layer.seen)
    @rule(rows=st.integers(1, 3))
    def reset(self, rows: int) -> None:
        self.layer.reset()
        assert not tensors_of(self.layer)
        assert self.layer.get_seq_length() == 0
        self.naive = [NaiveRow(self.layer.config, self.window) for _ in range(rows)]

    @invariant()
    def the_layer_is_the_naive_rows(self) -> None:
        if self.layer.is_initialized:
            assert_layer(self.layer, self.naive)
            assert sum(self.layer.nbytes().values()) == allocated(self.layer)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=30)


# --- crop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("removed", [1, 5, 22])
def test_open_tokens_that_are_cropped_were_never_there(config: TurboConfig, removed: int) -> None:
    tokens = 128 + 22
    k, v = random_kv(2, tokens)
    cropped = filled(config, k, v)
    cropped.crop(-removed)
    never = filled(config, k[:, :, : tokens - removed], v[:, :, : tokens - removed])
    for row in range(2):
        assert_same_rows(cropped, row, never, row)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kept", [0, 1, 63, 64, 65, 128, 149])
def test_a_crop_below_a_seal_keeps_the_values_that_stay(config: TurboConfig, kept: int) -> None:
    k, v = random_kv(2, 150)
    layer = filled(config, k, v)
    before = layer.dense(150)
    layer.crop(kept - 150)
    assert layer.seen == kept
    assert layer.lengths() == [kept, kept]
    assert layer.pool.pages <= 2 * (kept // config.block_size)
    for got, was in zip(layer.dense(kept), before, strict=True):
        assert torch.equal(got, was[:, :, :kept])


def test_a_cropped_cache_goes_on_like_one_that_was_never_cropped() -> None:
    # the crop falls on a seal, so that no rounded value stays
    k, v = random_kv(2, 300)
    other = random_kv(2, 300, seed=1)
    layer = filled(
        TurboConfig(low_heads=0.5), torch.cat((k[:, :, :192], other[0]), 2), torch.cat((v[:, :, :192], other[1]), 2)
    )
    layer.crop(-300)
    feed(layer, k[:, :, 192:], v[:, :, 192:])
    whole = filled(TurboConfig(low_heads=0.5), k, v)
    for row in range(2):
        assert_same_rows(layer, row, whole, row)


def test_pages_that_a_crop_frees_are_used_again() -> None:
    config, blocks = TurboConfig(block_size=32), 36
    k, v = random_kv(2, blocks * 32)
    layer, whole = filled(config, k, v), filled(config, k, v)
    for kept in (35, 34, 12, 0):
        # two pages of 72 are kept for the next blocks, more are given back
        layer.crop(35 * 32 - layer.seen)
        assert layer.pool.pages == 2 * blocks
        layer.crop(kept * 32 - layer.seen)
        assert layer.pool.pages == 2 * (blocks if kept == 35 else kept)
        for at in range(kept * 32, blocks * 32, 32):
            feed(layer, k[:, :, at : at + 32], v[:, :, at : at + 32])
        for row in range(2):
            assert_same_rows(layer, row, whole, row)
        assert layer.pool.pages == 2 * blocks


def test_a_cache_emptied_by_a_crop_can_be_read_and_filled() -> None:
    k, v = random_kv(1, 70)
    layer = filled(TurboConfig(), k, v, torch.arange(70)[None] >= 6)
    layer.crop(-64)
    assert layer.seen == 6
    assert layer.lengths() == [0]
    assert not layer.dense(6)[0].any()
    got = decode(torch.randn(1, HEADS, 1, 16), layer.store(), scaling=1.0, starts=torch.tensor([1]))
    assert not got.out.any()
    feed(layer, k, v)
    assert_same_rows(layer, 0, filled(TurboConfig(), k, v), 0)


def test_a_row_emptied_by_a_crop_ranks_its_heads_anew() -> None:
    config = TurboConfig(bits=4, low_bits=2, low_heads=2 / 3)
    k, v = random_kv(1, 100)
    k[:, 2] /= 100
    layer = filled(config, k * torch.tensor([1.0, 50.0, 1.0])[:, None, None], v)
    assert layer.order[0].tolist() == [1, 0, 2]
    layer.crop(-100)
    feed(layer, k * torch.tensor([50.0, 1.0, 1.0])[:, None, None], v)
    assert layer.order[0].tolist() == [0, 1, 2]


def test_a_row_keeps_the_ranking_of_a_block_that_left_its_window() -> None:
    config = TurboConfig(bits=4, low_bits=2, low_heads=2 / 3, block_size=32)
    k, v = random_kv(1, 64)
    k[:, 2] /= 100
    layer = filled(config, k * torch.tensor([1.0, 50.0, 1.0])[:, None, None], v, window=20)
    assert layer.dropped == [32]
    layer.crop(-5)
    assert layer.pool.sealed == [0]
    feed(layer, k * torch.tensor([1000.0, 1.0, 1.0])[:, None, None], v)
    assert layer.order[0].tolist() == [1, 0, 2]


@pytest.mark.parametrize("window", [None, 20], ids=["full", "window"])
def test_recording_waits_for_crop(window: int | None) -> None:
    k, v = random_kv(1, 200)
    layer = TurboLayer(TurboConfig(), window)
    feed(layer, k[:, :, :50], v[:, :, :50])
    layer.activate_past_recording()
    feed(layer, k[:, :, 50:180], v[:, :, 50:180])
    assert layer.pool.sealed == [0]
    assert layer.dropped == [0]
    assert layer.buffer.length == [180]
    # all of the draft goes: no trace of it is left, though it filled blocks and passed the window
    layer.crop(-130)
    assert_same_rows(layer, 0, filled(TurboConfig(), k[:, :, :50], v[:, :, :50], window=window), 0)
    feed(layer, k[:, :, 50:180], v[:, :, 50:180])
    layer.crop(-10)
    want = filled(TurboConfig(), k[:, :, :170], v[:, :, :170], window=window)
    assert_same_rows(layer, 0, want, 0)
    assert layer.dropped == want.dropped


def test_crop_takes_a_tensor_too() -> None:
    layer = filled(TurboConfig(), *random_kv(1, 20))
    layer.crop(torch.tensor(-3))  # type: ignore[arg-type]
    assert type(layer.get_seq_length()) is int
    assert layer.lengths() == [layer.seen] == [17]


def test_crop_refuses_what_it_cannot_give_back() -> None:
    k, v = random_kv(2, 200)
    valid = torch.arange(200) >= torch.tensor([[0], [30]])
    layer = filled(TurboConfig(), k, v, valid, window=40)
    with pytest.raises(ValueError, match="as a negative number; got 3"):
        layer.crop(3)
    with pytest.raises(ValueError, match=r"crop\(-201\): the cache holds only 200 columns"):
        layer.crop(-201)
    with pytest.raises(ValueError, match=r"crop\(-150\) needs tokens that have left the sliding window of 40"):
        layer.crop(-150)
    # a refusal changes nothing
    same = filled(TurboConfig(), k, v, valid, window=40)
    assert layer.seen == same.seen
    assert layer.columns is not None
    assert torch.equal(layer.columns, valid)
    for row in range(2):
        assert_same_rows(layer, row, same, row)


def test_an_empty_layer_has_nothing_to_crop_or_to_reorder() -> None:
    layer = TurboLayer(TurboConfig())
    layer.crop(-3)
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    layer.reset()
    assert layer.get_seq_length() == 0
    assert sum(layer.nbytes().values()) == layer.full_precision_bytes() == 0


# --- rows ----------------------------------------------------------------------------------------------------------


def test_beams_share_pages_and_then_part() -> None:
    k, v = random_kv(1, 128)
    layer = filled(TurboConfig(), k, v)
    layer.batch_repeat_interleave(3)
    assert layer.pool.pages == 2
    tail = random_kv(3, 70, seed=1)
    feed(layer, *tail)
    assert layer.pool.pages == 2 + 3
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert layer.pool.pages == 2 + 2
    for row, parent in enumerate((2, 2, 0)):
        own = [torch.cat((x, y[parent : parent + 1]), 2) for x, y in zip((k, v), tail, strict=True)]
        assert_same_rows(layer, row, filled(TurboConfig(), own[0], own[1]), 0)


def test_a_deep_copy_and_its_original_live_apart() -> None:
    k, v = random_kv(2, 150)
    original = filled(TurboConfig(low_heads=0.5), k, v)
    twin = copy.deepcopy(original)
    original.crop(-100)
    feed(original, *random_kv(2, 300, seed=1))
    same = filled(TurboConfig(low_heads=0.5), k, v)
    for row in range(2):
        assert_same_rows(twin, row, same, row)


# --- window --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("mode", ["fp16", "turbo"])
def test_a_rolling_window_loses_no_visible_token(window: int, mode: str, device: torch.device) -> None:
    k, v = (x.to(device) for x in random_kv(2, 500))
    rolled, whole = TurboLayer(TurboConfig(), window), TurboLayer(TurboConfig())
    at = 0
    for tokens in (300, 7, 64, *[1] * 16, 113):
        part = slice(at, at + tokens)
        for layer in (rolled, whole):
            layer.append(k[:, :, part], v[:, :, part], Chunk(tokens))
        at += tokens
        if tokens <= DECODE_TOKENS:
            # as in a pass: attention reads the cache before it is committed
            q = torch.randn(2, 2 * HEADS, tokens, 16, device=device)
            got = decode(q, rolled.store(), scaling=0.3, window=window, mode=mode)
            rows = store_codes(whole.store())
            if mode == "fp16":
                check_exact(got, q, [row.values() for row in rows], scaling=0.3, window=window)
            else:
                check_turbo(got, int8_queries(q, [0] * len(q)), q.dtype, rows, scaling=0.3, window=window)
        rolled.commit()
        whole.commit()
        assert max(rolled.lengths()) < window - 1 + 64
    assert rolled.dropped[0] > 0
    assert rolled.get_max_length() == window
    assert whole.get_max_length() == -1


def test_a_rolling_window_has_bounded_memory() -> None:
    layer, sizes = TurboLayer(TurboConfig(), 128), []
    for step in range(60):
        feed(layer, *random_kv(2, 33, seed=step))
        sizes.append(sum(layer.nbytes().values()))
    # two blocks of window, one more that is on its way out, one of open tokens; the table doubles
    most = HEADS * 2 * (3 * page_bytes(16, 4) + 64 * open_token_bytes(16)) + 2 * 8 * 4 + 2 * HEADS * 8
    assert max(sizes[10:]) <= most


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_memory_is_what_is_reported_and_near_theory(config: TurboConfig, rows: int, dim: int) -> None:
    tokens, heads = 2048, 4
    layer = TurboLayer(config)
    k, v = (x.to(torch.bfloat16) for x in random_kv(rows, tokens, dim, heads))
    feed(layer, k, v)
    for step in range(150):
        feed(layer, *(x.to(torch.bfloat16) for x in random_kv(rows, 1, dim, heads, seed=step)))
        if step in {0, 20, 149}:
            block, held = config.block_size, tokens + step + 1
            page = sum(n * page_bytes(dim, bits, block) for bits, n in config.head_groups(heads))
            room = -(-(held % block) // 16) * 16 or 16
            pages, open_bytes = rows * (held // block) * page, rows * heads * room * open_token_bytes(dim)
            sizes = layer.nbytes()
            assert sum(sizes.values()) == allocated(layer)
            assert sizes["open"] == open_bytes
            assert pages <= sizes["codes"] + sizes["scales"] <= 1.05 * pages
            assert layer.full_precision_bytes() == 2 * 2 * rows * heads * dim * held


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_four_bit_takes_less_than_a_third_of_half_precision(rows: int, dim: int) -> None:
    layer = TurboLayer(TurboConfig(bits=4))
    feed(layer, *(x.to(torch.bfloat16) for x in random_kv(rows, 2048, dim)))
    for step in range(5):
        feed(layer, *(x.to(torch.bfloat16) for x in random_kv(rows, 1, dim, seed=step)))
    assert layer.full_precision_bytes() / sum(layer.nbytes().values()) >= 3.6


def test_growth_copies_a_constant_number_of_pages_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    resize = PagePool._resize

    def counted(pool: PagePool, keep: Tensor, extra: int) -> None:
        copied.append(len(keep))
        resize(pool, keep, extra)

    monkeypatch.setattr(PagePool, "_resize", counted)
    layer, blocks = TurboLayer(TurboConfig(block_size=32)), 1024
    k, v = random_kv(1, 32, heads=1)
    for _ in range(blocks):
        feed(layer, k, v)
    assert layer.pool.sealed == [blocks]
    # fewer than 64 pages grow by one, more by a thirty-second; to copy all for each block would be blocks**2 / 2
    assert sum(copied) <= 64 * blocks
    assert blocks <= layer.pool.pages <= blocks + blocks // 32


@pytest.mark.parametrize("shrinks", [False, True], ids=["grows", "shrinks"])
def test_pages_for_which_there_is_no_memory_change_nothing(shrinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = filled(TurboConfig(block_size=32), *random_kv(3, 200))
    # rows that share pages, between pages that no row holds
    layer.batch_select_indices(torch.tensor([1, 1, 2]))
    pool, before = layer.pool, layer.dense(200)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    if shrinks:
        pool.reserve([3, 0, 3])
    with monkeypatch.context() as patched:
        patched.setattr("turbo_hf.pages.empty_pages", full)
        with pytest.raises(torch.OutOfMemoryError):
            pool.trim() if shrinks else pool.reserve([20, 20, 20])
    assert all(torch.equal(x, y) for x, y in zip(layer.dense(200), before, strict=True))
    pool.reserve([9, 9, 9])
    held = pool.table[:, :15]
    assert int(held.max()) < pool.pages
    assert len(held[:, 6:].unique()) == 27
    pool.trim()
    assert pool.pages == 12
    assert all(torch.equal(x, y) for x, y in zip(layer.dense(200), before, strict=True))


def test_nothing_of_full_precision_stays() -> None:
    layer = filled(TurboConfig(low_heads=0.5), *random_kv(2, 200))
    layer.update(*random_kv(2, 1))
    layer.claimed = True
    k, v = random_kv(2, 1)
    assert layer.update(k, v)[0] is k
    # the attention function takes the pending tensors away
    layer.pending = None
    tokens = sum(layer.lengths())
    for x in tensors_of(layer):
        assert not x.is_floating_point() or x.numel() <= 2 * HEADS * tokens


# --- update without the attention function -------------------------------------------------------------------------


def test_a_claimed_update_hands_the_tensors_on() -> None:
    layer = TurboLayer(TurboConfig())
    layer.claimed = True
    k, v = random_kv(1, 3)
    got = layer.update(k, v)
    assert got[0] is k
    assert got[1] is v
    assert layer.pending == (k, v)
    assert layer.get_seq_length() == 0
    # one shot: the next call stores
    assert not layer.claimed
    layer.update(k, v)
    assert layer.get_seq_length() == 3


@pytest.mark.parametrize("window", [None, 30], ids=["full", "window"])
def test_an_unclaimed_update_returns_dense_keys_and_values(window: int | None) -> None:
    k, v = random_kv(2, 300)
    layer, naive = TurboLayer(TurboConfig(), window), [NaiveRow(TurboConfig(), window) for _ in range(2)]
    at = 0
    for tokens in (100, 1, 5, 16, 17, 90, 1):
        own_k, own_v = k[:, :, at : at + tokens], v[:, :, at : at + tokens]
        columns = layer.get_mask_sizes(tokens)[0]
        got = layer.update(own_k, own_v)
        joins = at > 0 and tokens <= DECODE_TOKENS
        past = [row.values(columns - tokens, 16) for row in naive]
        for row, one in enumerate(naive):
            one.append(own_k[row], own_v[row], [True] * tokens)
            # a prompt is returned as it came; a token as every later pass will see it until its block is sealed
            want = (
                one.values(columns, 16)
                if joins
                else [torch.cat((x, y[row]), 1) for x, y in zip(past[row], (own_k, own_v), strict=True)]
            )
            one.commit()
            assert torch.equal(got[0][row], want[0])
            assert torch.equal(got[1][row], want[1])
        at += tokens
    assert_layer(layer, naive)


def test_padding_told_beforehand_is_not_stored_and_what_follows_it_is() -> None:
    k, v = random_kv(2, 90)
    layer = TurboLayer(TurboConfig())
    layer.padding = torch.arange(70) >= torch.tensor([[0], [50]])
    layer.update(k[:, :, :20], v[:, :, :20])
    layer.update(k[:, :, 20:65], v[:, :, 20:65])
    # this pass begins inside the mask and ends behind it
    dense = layer.update(k[:, :, 65:80], v[:, :, 65:80])
    layer.update(k[:, :, 80:], v[:, :, 80:])
    assert layer.seen == 90
    assert layer.lengths() == [90, 40]
    assert dense[0].shape[2] == 80
    assert not dense[0][1, :, :50].any()
    assert_same_rows(layer, 1, filled(TurboConfig(), k[1:, :, 50:], v[1:, :, 50:]), 0)


def test_a_pass_that_is_all_padding_stores_nothing() -> None:
    k, v = random_kv(1, 40)
    layer = TurboLayer(TurboConfig())
    layer.padding = torch.arange(40)[None] >= 25
    assert not layer.update(k[:, :, :3], v[:, :, :3])[0][:, :, 3:].any()
    assert layer.lengths() == [0]
    assert not layer.dense(3)[0].any()
    got = decode(torch.randn(1, HEADS, 1, 16), layer.store(), scaling=1.0, starts=torch.tensor([1]))
    assert not got.out.any()
    layer.update(k[:, :, 3:], v[:, :, 3:])
    assert_same_rows(layer, 0, filled(TurboConfig(), k[:, :, 25:], v[:, :, 25:]), 0)


# --- universal scale -----------------------------------------------------------------------------------------------


def test_a_universal_scale_is_fixed_by_the_prompt(device: torch.device) -> None:
    config = TurboConfig(buffer_scale="universal")
    k, v = (x.to(device) for x in random_kv(2, 40))
    layer = filled(config, k, v)
    prompt = filled(TurboConfig(), k, v)
    assert_same_rows(layer, 0, prompt, 0)
    # of tensors: by a number, torch multiplies by a rounded reciprocal on CUDA
    span = [x.abs().amax((2, 3)).float() for x in (rotate_keys(k), v)]
    span = [x / torch.full_like(x, CODE_MAX) for x in span]
    small, large = (torch.full((2, HEADS, 1, 16), x, device=device) for x in (1e-3, -1e3))
    feed(layer, small, large)
    feed(layer, large, small)
    for row in range(2):
        for step in (40, 41):
            assert torch.equal(layer.buffer.k_scale[row, :, step], span[0][row])
            assert torch.equal(layer.buffer.v_scale[row, :, step], span[1][row])
    assert (layer.buffer.v[..., 40] == -CODE_MAX).all()
    # equal channels are rotated into the first
    assert (layer.buffer.k[:, :, 41, 0] == -CODE_MAX).all()


def test_a_universal_scale_covers_every_chunk_of_a_prompt() -> None:
    config = TurboConfig(buffer_scale="universal")
    k, v = random_kv(1, 90)
    k[:, :, 10], v[:, :, 60] = k[:, :, 10] * 20, v[:, :, 60] * 20
    whole, chunked = filled(config, k, v), TurboLayer(config)
    for at in (0, 30, 60):
        feed(chunked, k[:, :, at : at + 30], v[:, :, at : at + 30])
    new = random_kv(1, 1, seed=1)
    feed(whole, *new)
    feed(chunked, *new)
    assert_same_rows(chunked, 0, whole, 0)
    assert torch.equal(chunked.buffer.k_scale[0, :, 26], rotate_keys(k)[0, :, 10].abs().amax(-1) / CODE_MAX)
    assert torch.equal(chunked.buffer.v_scale[0, :, 26], v[0, :, 60].abs().amax(-1) / CODE_MAX)


def test_a_universal_scale_is_one_a_row_and_ignores_padding() -> None:
    config = TurboConfig(buffer_scale="universal")
    k, v = random_kv(3, 60)
    valid = torch.arange(60) >= torch.tensor([[0], [45], [60]])
    batch = filled(config, k.masked_fill(~valid[:, None, :, None], 1e9), v, valid)
    k_new, v_new = random_kv(3, 1, seed=1)
    feed(batch, k_new * 100, v_new)
    for row, first in ((0, 0), (1, 45)):
        alone = filled(config, k[row : row + 1, :, first:], v[row : row + 1, :, first:])
        feed(alone, k_new[row : row + 1] * 100, v_new[row : row + 1])
        assert_same_rows(batch, row, alone, 0)
    # a row without a prompt has no range: its tokens keep their own
    assert_same_rows(batch, 2, filled(TurboConfig(), k_new[2:] * 100, v_new[2:]), 0)
    batch.reorder_cache(torch.tensor([1, 0, 2]))
    feed(batch, k_new, v_new)
    assert torch.equal(batch.buffer.k_scale[0, :, 16], rotate_keys(k)[1, :, 45:].abs().amax((1, 2)) / CODE_MAX)
    assert sum(batch.nbytes().values()) == allocated(batch)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["token", "universal"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("seen", [0, 20], ids=["prompt", "token"])
def test_nan_and_infinity_are_refused(scale: Any, bad: float, which: int, seen: int) -> None:
    layer = TurboLayer(TurboConfig(buffer_scale=scale), index=7)
    if seen:
        feed(layer, *random_kv(1, seen))
    new = random_kv(1, 2, seed=1)
    new[which][0, 1, 1, 3] = bad
    with pytest.raises(ValueError, match="layer 7: keys or values hold NaN or Inf"):
        feed(layer, *new)
    assert layer.seen == seen
    if seen:
        # the pass left no trace
        clean = TurboLayer(TurboConfig(buffer_scale=scale))
        for one in (layer, clean):
            if one is clean:
                feed(one, *random_kv(1, seen))
            feed(one, *random_kv(1, 3, seed=2))
        assert_same_rows(layer, 0, clean, 0)


def test_another_batch_or_other_heads_are_refused() -> None:
    layer = filled(TurboConfig(), *random_kv(2, 20))
    with pytest.raises(ValueError, match="holds 2 rows of 3 heads; this pass brings 3 of 3"):
        feed(layer, *random_kv(3, 1))
    with pytest.raises(ValueError, match="holds 2 rows of 3 heads; this pass brings 2 of 4"):
        feed(layer, *random_kv(2, 1, heads=4))
    layer.reset()
    feed(layer, *random_kv(3, 1))
    assert layer.lengths() == [1, 1, 1]


def test_keys_and_values_of_unlike_shape_are_refused() -> None:
    layer = TurboLayer(TurboConfig(), index=4)
    with pytest.raises(ValueError, match=r"layer 4: keys \(1, 3, 3, 32\) and values \(1, 3, 3, 16\) differ"):
        layer.update(random_kv(1, 3, 32)[0], random_kv(1, 3, 16)[1])
    with pytest.raises(ValueError, match="head dim 24"):
        layer.update(*random_kv(1, 3, 24))


# --- masks of a pass -----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_a_chunk_puts_tokens_at_the_end_and_takes_them_back(rows: list[list[bool]]) -> None:
    valid = torch.tensor(rows)
    chunk = chunk_of(valid)
    starts = chunk.starts or [0] * len(rows)
    assert [chunk.tokens - start for start in starts] == valid.sum(-1).tolist()
    x = torch.arange(1.0, 7.0).expand(len(rows), 2, 6)[..., None]
    aligned = chunk.align(x)
    for row, real in enumerate(valid):
        tokens = x[row, :, real]
        assert torch.equal(aligned[row, :, 6 - tokens.shape[1] :], tokens)
    assert torch.equal(chunk.restore(aligned), x)
    if valid.all():
        assert chunk == Chunk(6)


def test_a_mask_that_contradicts_the_cache_is_refused() -> None:
    stored = torch.tensor([[0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    assert chunk_from_mask(mask, 3, 2, stored).starts == [1, 0]
    assert chunk_from_mask(torch.ones(2, 5), 3, 2, None) == Chunk(2)
    with pytest.raises(ValueError, match="attention_mask has 2 columns; the cache holds 3 and this pass brings 2"):
        chunk_from_mask(mask[:, 3:], 3, 2, stored)
    for past in (None, ~stored):
        with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
            chunk_from_mask(mask, 3, 2, past)
    # no mask shows every column, so it contradicts a cache that left some out
    assert chunk_from_mask(None, 3, 2, stored[1:]) == Chunk(2)
    with pytest.raises(ValueError, match="none means all ones"):
        chunk_from_mask(None, 3, 2, stored)


@pytest.mark.parametrize("bits", [8, 4])
def test_float16_keys_at_the_end_of_the_range_come_back_finite(bits: int) -> None:
    k, v = (x.half() for x in random_kv(1, 130))
    k[..., 3], k[..., 5] = 65504.0, -65504.0
    layer = filled(TurboConfig(bits=bits), k, v)
    held = layer.dense(130)
    assert all(bool(x.isfinite().all()) for x in held)
    plain = filled(TurboConfig(bits=bits, rotate_keys=False), k, v).dense(130)
    # rotated, the two channels cost the others precision, and no more than the range of float16
    assert largest(held[0].float() - k.float()) <= 2 * largest(plain[0].float() - k.float()) + 65504 / 119
