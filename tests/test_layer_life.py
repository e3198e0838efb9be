"""A layer that is appended to and cropped as it comes, against the naive one."""

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from layer_support import (
    CONFIGS,
    HEADS,
    NaiveRow,
    allocated,
    assert_layer,
    assert_same_rows,
    feed,
    filled,
    random_kv,
    tensors_of,
)
from op_calls import decode

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.new_columns import NewColumns
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.ops.store.reference_pages import sealed_tokens

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
        original.append(*random_kv(len(self.naive), 1, seed=99), NewColumns(1))

    @precondition(lambda self: self.layer.seen)
    @rule(rows=st.integers(1, 3))
    def reset(self, rows: int) -> None:
        self.layer.reset()
        assert not tensors_of(self.layer)
        assert self.layer.get_seq_length() == 0
        self.naive, self.recording = [NaiveRow(self.layer.config, self.window) for _ in range(rows)], False

    @invariant()
    def the_layer_is_the_naive_rows(self) -> None:
        if self.layer.is_initialized:
            assert_layer(self.layer, self.naive)
            assert sum(self.layer.nbytes().values()) == allocated(self.layer)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)


# --- crop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_open_tokens_that_are_cropped_were_never_there(config: TurboConfig) -> None:
    tokens = 128 + 22
    k, v = random_kv(2, tokens)
    for removed in (1, 5, 22):
        cropped = filled(config, k, v)
        cropped.crop(-removed)
        never = filled(config, k[:, :, : tokens - removed], v[:, :, : tokens - removed])
        for row in range(2):
            assert_same_rows(cropped, row, never, row)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_crop_below_a_seal_keeps_the_values_that_stay(config: TurboConfig) -> None:
    """Of a block that is cut, what stays is rounded to INT8, in units of its tokens' sizes."""
    k, v = random_kv(2, 150)
    for kept in (0, 1, 63, 64, 65, 128, 149):
        layer = filled(config, k, v)
        before, store = layer.dequantized(150), layer.kv_store()
        _, k_size, _, v_size = sealed_tokens(store)
        layer.crop(kept - 150)
        assert layer.seen == kept
        assert layer.lengths() == [kept, kept]
        assert layer.pool.pages <= 2 * (kept // config.block_size)
        # half a size of each channel; rotated keys by this in their norm
        sealed, whole = k_size.shape[2], kept // config.block_size * config.block_size
        for got, was, size in zip(layer.dequantized(kept), before, (k_size, v_size), strict=True):
            assert torch.equal(got[:, :, :whole], was[:, :, :whole])
            assert torch.equal(got[:, :, sealed:], was[:, :, sealed:kept])
            off = (got - was[:, :, :kept]).norm(dim=-1)[:, :, whole : min(sealed, kept)]
            most = size[:, :, whole:kept] * (16**0.5 / 2) * (1 + 1e-5)
            assert bool((off <= (0 if config == TurboConfig(bits=8) else most)).all())


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
    assert not layer.dequantized(6)[0].any()
    got = decode(torch.randn(1, HEADS, 1, 16), layer.kv_store(), scaling=1.0, starts=torch.tensor([1]))
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
    assert layer.state.dropped == [32]
    layer.crop(-5)
    assert layer.state.sealed == [0]
    feed(layer, k * torch.tensor([1000.0, 1.0, 1.0])[:, None, None], v)
    assert layer.order[0].tolist() == [1, 0, 2]


@pytest.mark.parametrize("window", [None, 20], ids=["full", "window"])
def test_recording_waits_for_crop(window: int | None) -> None:
    k, v = random_kv(1, 200)
    layer = TurboLayer(TurboConfig(), window)
    feed(layer, k[:, :, :50], v[:, :, :50])
    layer.activate_past_recording()
    feed(layer, k[:, :, 50:180], v[:, :, 50:180])
    assert layer.state.sealed == [0]
    assert layer.state.dropped == [0]
    assert layer.state.open == [180]
    # all of the draft goes: no trace of it is left, though it filled blocks and passed the window
    layer.crop(-130)
    assert_same_rows(layer, 0, filled(TurboConfig(), k[:, :, :50], v[:, :, :50], window=window), 0)
    feed(layer, k[:, :, 50:180], v[:, :, 50:180])
    layer.crop(-10)
    want = filled(TurboConfig(), k[:, :, :170], v[:, :, :170], window=window)
    assert_same_rows(layer, 0, want, 0)
    assert layer.state.dropped == want.state.dropped


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
    assert layer.valid is not None
    assert torch.equal(layer.valid, valid)
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
