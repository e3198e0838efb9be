"""`TurboLayer`: what it stores, in how many bytes, and what it gives back."""

import copy
import pickle
from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_turn
from hypothesis import given, settings
from hypothesis import strategies as st
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
from models import tiny_llama
from op_calls import decode
from torch import Tensor

from turbo_hf.cache.claimed_cache import claimed
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.page_pool import PagePool
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.layout import CODE_MAX, open_token_bytes, page_bytes
from turbo_hf.ops.store.reference_quantize import rounded_up

# --- what is stored ------------------------------------------------------------------------------------------------


@in_turn(config=CONFIGS, dim=[16, 48, 128])
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
    assert chunked.state.dropped == whole.state.dropped
    for row in range(2):
        assert_same_rows(chunked, row, whole, row)


@all_pairs(
    side=["left", "right", "holes"],
    junk=[torch.nan, torch.inf, 1e30],
    window=[pytest.param(None, id="full"), pytest.param(50, id="window")],
    config=CONFIGS,
)
def test_rows_of_a_padded_batch_are_what_they_are_alone(
    side: str, junk: float, window: int | None, config: TurboConfig, poison: None
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
            assert batch.state.dropped[row] == alone.state.dropped[0]
        else:
            assert batch.lengths()[row] == 0


def test_a_long_prompt_is_sealed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = random_kv(3, 300)
    valid = torch.arange(300) >= torch.tensor([[0], [77], [200]])
    config = TurboConfig(low_heads=0.5)
    whole = filled(config, k, v, valid)
    for blocks in (1, 3):
        monkeypatch.setattr("turbo_hf.ops.store.reference_append.SEAL_ELEMENTS", blocks * HEADS * 64 * 16)
        parts = filled(config, k, v, valid)
        for row in range(3):
            assert_same_rows(parts, row, whole, row)


def test_a_half_precision_cache_is_that_of_the_same_numbers_in_float32() -> None:
    k, v = (x.to(torch.bfloat16) for x in random_kv(1, 100))
    half, single = filled(TurboConfig(), k, v), filled(TurboConfig(), k.float(), v.float())
    assert_same_rows(half, 0, single, 0)
    assert half.dequantized(100)[0].dtype == torch.bfloat16


def test_the_first_block_ranks_the_heads_of_each_row(device: torch.device) -> None:
    k, v = (x.to(device) for x in random_kv(2, 128, heads=4))
    # in row 0 head 3 has by far the widest channels, in row 1 head 0; the second block says the opposite
    for row, head, other in ((0, 3, 0), (1, 0, 3)):
        k[row, head, :64, 0] *= 50
        k[row, other, 64:, 0] *= 5000
    config = TurboConfig(bits=4, low_bits=2, low_heads=0.75)
    layer = filled(config, k, v)
    assert [pages.bits for pages in layer.kv_store().paged] == [4, 2]
    assert layer.kv_store().order[:, 0].tolist() == [3, 0]


# --- memory --------------------------------------------------------------------------------------------------------


@all_pairs(dim=[64, 128], rows=[1, 4], config=CONFIGS)
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
            whole = (held - config.recent_tokens) // block
            room = -(-(held - whole * block) // 16) * 16 or 16
            pages, open_bytes = rows * whole * page, rows * heads * room * open_token_bytes(dim)
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
    assert layer.full_precision_bytes() / sum(layer.nbytes().values()) >= 3.5


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
    assert layer.state.sealed == [blocks]
    # fewer than 64 pages grow by one, more by a thirty-second; to copy all for each block would be blocks**2 / 2
    assert sum(copied) <= 64 * blocks
    assert blocks <= layer.pool.pages <= blocks + blocks // 32


@pytest.mark.parametrize("shrinks", [False, True], ids=["grows", "shrinks"])
def test_pages_for_which_there_is_no_memory_change_nothing(shrinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = filled(TurboConfig(block_size=32), *random_kv(3, 200))
    # rows that share pages, between pages that no row holds
    layer.batch_select_indices(torch.tensor([1, 1, 2]))
    pool, sealed, before = layer.pool, layer.state.sealed, layer.dequantized(200)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    if shrinks:
        pool.reserve(sealed, [3, 0, 3])
    with monkeypatch.context() as patched:
        patched.setattr("turbo_hf.cache.page_pool.empty_pages", full)
        with pytest.raises(torch.OutOfMemoryError):
            pool.trim(sealed) if shrinks else pool.reserve(sealed, [20, 20, 20])
    assert all(torch.equal(x, y) for x, y in zip(layer.dequantized(200), before, strict=True))
    pool.reserve(sealed, [9, 9, 9])
    held = pool.table[:, :15]
    assert int(held.max()) < pool.pages
    assert len(held[:, 6:].unique()) == 27
    pool.trim(sealed)
    assert pool.pages == 12
    assert all(torch.equal(x, y) for x, y in zip(layer.dequantized(200), before, strict=True))


def test_layers_that_have_stored_the_same_count_the_same() -> None:
    k, v = random_kv(2, 200)
    layers = [TurboLayer(TurboConfig(bits=bits), window=70) for bits in (4, 8)]
    for layer in layers:
        layer.update(k, v)
        before = layer.state
        kept = copy.deepcopy(before)
        layer.update(*random_kv(2, 80))
        layer.crop(-3)
        layer.reorder_cache([1, 0])
        # what another layer may share does not change
        assert before == kept
        assert layer.state != before
    assert layers[0].state == layers[1].state


def test_nothing_of_full_precision_stays() -> None:
    layer = filled(TurboConfig(low_heads=0.5), *random_kv(2, 200))
    layer.update(*random_kv(2, 1))
    tokens = sum(layer.lengths())
    for x in tensors_of(layer):
        assert not x.is_floating_point() or x.numel() <= 2 * HEADS * tokens


# --- update without the attention function -------------------------------------------------------------------------


def test_a_claimed_update_hands_the_tensors_on() -> None:
    cache = TurboCache(tiny_llama().config)
    view = claimed(cache, 1)
    k, v = random_kv(1, 3)
    got = view.update(k, v, 1)
    assert got[0] is k
    assert got[1] is v
    assert view.given == (k, v)
    assert cache.get_seq_length(1) == 0
    # one shot: the next call stores, as does one of another layer
    view.update(k, v, 0)
    view.update(k, v, 1)
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [3, 3]


def test_a_claim_is_of_one_call() -> None:
    cache = TurboCache(tiny_llama().config)
    view = claimed(cache, 0)
    k, v = random_kv(1, 3)
    # the cache itself knows nothing of it
    assert cache.update(k, v, 0)[0] is not k
    assert cache.get_seq_length() == view.get_seq_length() == 3
    view.decompressed = True
    assert cache.decompressed


def test_a_view_that_a_hook_has_kept_is_as_good_as_the_cache() -> None:
    cache = TurboCache(tiny_llama().config)
    k, v = random_kv(1, 3)
    kept = claimed(cache, 0)
    # claimed again for another layer
    assert claimed(kept, 1).update(k, v, 1)[0] is k
    for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        copied.update(k, v, 0)
        assert copied.get_seq_length() == 3
        assert cache.get_seq_length() == 0
    assert type(pickle.loads(pickle.dumps(kept))) is TurboCache


def test_a_subclass_with_slots_is_refused_clearly() -> None:
    class Slotted(TurboCache):
        __slots__ = ("extra",)

    with pytest.raises(Unsupported, match="without __slots__"):
        claimed(Slotted(tiny_llama().config), 0)


def test_a_claim_keeps_what_a_subclass_overrides() -> None:
    class Doubling(TurboCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(2 * key_states, value_states, *args, **kwargs)

    view = claimed(Doubling(tiny_llama().config), 0)
    k, v = random_kv(1, 3)
    assert isinstance(view, Doubling)
    assert torch.equal(view.update(k, v, 0)[0], 2 * k)
    assert view.get_seq_length() == 0


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
    layer.given_mask = torch.arange(70) >= torch.tensor([[0], [50]])
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


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_padding_of_every_row_takes_no_room(backend: Any, device: torch.device) -> None:
    k, v = (x.to(device) for x in random_kv(2, 60))
    valid = torch.arange(60, device=device) >= torch.tensor([[40], [50]], device=device)
    config = TurboConfig(backend=backend)
    layer = filled(config, k, v, valid)
    assert layer.lengths() == [20, 10]
    assert_same_rows(layer, 0, filled(config, k[:1, :, 40:], v[:1, :, 40:]), 0)


def test_a_pass_that_is_all_padding_stores_nothing() -> None:
    k, v = random_kv(1, 40)
    layer = TurboLayer(TurboConfig())
    layer.given_mask = torch.arange(40)[None] >= 25
    assert not layer.update(k[:, :, :3], v[:, :, :3])[0][:, :, 3:].any()
    assert layer.lengths() == [0]
    assert not layer.dequantized(3)[0].any()
    got = decode(torch.randn(1, HEADS, 1, 16), layer.kv_store(), scaling=1.0, starts=torch.tensor([1]))
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
    span = [x.abs().amax((2, 3)).float() for x in (k, v)]
    span = [rounded_up(x / torch.full_like(x, CODE_MAX)) for x in span]
    small, large = (torch.full((2, HEADS, 1, 16), x, device=device) for x in (1e-3, -1e3))
    feed(layer, small, large)
    feed(layer, large, small)
    for row in range(2):
        for step in (40, 41):
            assert torch.equal(layer.buffer.k_scale[row, :, step], span[0][row])
            assert torch.equal(layer.buffer.v_scale[row, :, step], span[1][row])
    assert (layer.buffer.v[..., 40] == -CODE_MAX).all()
    assert (layer.buffer.k[:, :, 41] == -CODE_MAX).all()


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
    assert torch.equal(chunked.buffer.k_scale[0, :, 26], rounded_up(k[0, :, 10].abs().amax(-1) / CODE_MAX))
    assert torch.equal(chunked.buffer.v_scale[0, :, 26], rounded_up(v[0, :, 60].abs().amax(-1) / CODE_MAX))


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
    scale = rounded_up(k[1, :, 45:].abs().amax((1, 2)) / CODE_MAX)
    assert torch.equal(batch.buffer.k_scale[0, :, 16], scale)
    assert sum(batch.nbytes().values()) == allocated(batch)
