"""A `TurboLayer` against a naive one: what it stores, in how many bytes, what it gives back, and what it refuses."""

import copy
import pickle
from typing import Any

import layer_support as support
import pytest
import torch
from choices import flat_config
from models import tiny_llama
from torch import Tensor

from turbo_hf.attention.turbo_attention import claimed
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.page_pool import PagePool
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.layout import FIRST, open_token_bytes, page_bytes

# --- what is stored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("config", support.CONFIGS)
def test_one_pass_stores_the_naive_rows(config: TurboConfig, junk: float, device: torch.device, poison: None) -> None:
    """Of rows with holes, at which anything may lie."""
    k, v = (x.to(device) for x in support.random_kv(3, 150, 48))
    valid = torch.rand(3, 150, device=device) < torch.tensor([[1.0], [0.7], [0.0]], device=device)
    want = [support.NaiveRow(config) for _ in range(3)]
    for row, naive in enumerate(want):
        naive.append(k[row], v[row], valid[row].tolist())
        naive.commit()
    k, v = (x.masked_fill(~valid[:, None, :, None], junk) for x in (k, v))
    support.assert_layer(support.filled(config, k, v, valid), want)


def test_a_long_prompt_is_sealed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = support.random_kv(3, 300)
    valid = torch.arange(300) >= torch.tensor([[0], [77], [200]])
    config = flat_config(low_heads=0.5)
    whole = support.filled(config, k, v, valid)
    for blocks in (1, 3):
        monkeypatch.setattr("turbo_hf.ops.store.reference.SEAL_ELEMENTS", blocks * support.HEADS * 64 * 16)
        parts = support.filled(config, k, v, valid)
        for row in range(3):
            support.assert_same_rows(parts, row, whole, row)


def test_a_half_precision_cache_is_that_of_float32() -> None:
    k, v = (x.to(torch.bfloat16) for x in support.random_kv(1, 100))
    half, single = support.filled(TurboConfig(), k, v), support.filled(TurboConfig(), k.float(), v.float())
    support.assert_same_rows(half, 0, single, 0)
    assert half.dequantized(100)[0].dtype == torch.bfloat16


# --- memory --------------------------------------------------------------------------------------------------------


def test_growth_copies_a_constant_number_of_pages_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    resize = PagePool._resize

    def counted(pool: PagePool, keep: Tensor, extra: int) -> None:
        copied.append(len(keep))
        resize(pool, keep, extra)

    monkeypatch.setattr(PagePool, "_resize", counted)
    layer, blocks = TurboLayer(flat_config(block_size=32, recent_tokens=0)), 1024
    support.feed(layer, *support.random_kv(1, FIRST, heads=1))
    k, v = support.random_kv(1, 32, heads=1)
    for _ in range(blocks):
        support.feed(layer, k, v)
    assert layer.state.sealed == [blocks]
    # fewer than 64 pages grow by one, more by a thirty-second; to copy all for each block would be blocks**2 / 2
    assert sum(copied) <= 64 * blocks
    assert blocks <= layer.pool.pages <= blocks + blocks // 32


# --- update without the attention function -------------------------------------------------------------------------


def test_a_claimed_update_hands_the_tensors_on() -> None:
    cache = TurboCache(tiny_llama().config)
    view = claimed(cache, 1)
    k, v = support.random_kv(1, 3)
    got = view.update(k, v, 1)
    assert got[0] is k
    assert got[1] is v
    assert view.given == (k, v)
    assert cache.get_seq_length(1) == 0
    # one shot: the next call stores, as does one of another layer
    view.update(k, v, 0)
    view.update(k, v, 1)
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [3, 3]
    # the cache itself knows nothing of it
    claimed(cache, 0)
    assert cache.update(k, v, 0)[0] is not k
    view.decompressed = True
    assert cache.decompressed


def test_a_view_that_a_hook_has_kept_is_as_good_as_the_cache() -> None:
    cache = TurboCache(tiny_llama().config)
    k, v = support.random_kv(1, 3)
    kept = claimed(cache, 0)
    # claimed again for another layer
    assert claimed(kept, 1).update(k, v, 1)[0] is k
    for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        copied.update(k, v, 0)
        assert copied.get_seq_length() == 3
        assert cache.get_seq_length() == 0
    assert type(pickle.loads(pickle.dumps(kept))) is TurboCache


class Slotted(TurboCache):
    __slots__ = ("extra",)


class Doubling(TurboCache):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(2 * key_states, value_states, *args, **kwargs)


def test_a_claim_keeps_what_a_subclass_overrides() -> None:
    view = claimed(Doubling(tiny_llama().config), 0)
    k, v = support.random_kv(1, 3)
    assert isinstance(view, Doubling)
    assert torch.equal(view.update(k, v, 0)[0], 2 * k)
    assert view.get_seq_length() == 0
    with pytest.raises(Unsupported, match="without __slots__"):
        claimed(Slotted(tiny_llama().config), 0)


@pytest.mark.parametrize("window", [None, 30], ids=["full", "window"])
def test_an_unclaimed_update_returns_dense_keys_and_values(window: int | None) -> None:
    k, v = support.random_kv(2, 300)
    layer, naive = TurboLayer(TurboConfig(), window), [support.NaiveRow(TurboConfig(), window) for _ in range(2)]
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
    support.assert_layer(layer, naive)


# --- crop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 33, 70])
@pytest.mark.parametrize("config", support.CONFIGS)
def test_a_crop_leaves_the_naive_rows(config: TurboConfig, window: int | None) -> None:
    """Also below sealed blocks, which become open again; between passes that seal, with rows of other lengths."""
    layer, naive = TurboLayer(config, window), [support.NaiveRow(config, window) for _ in range(2)]
    for seed, (tokens, columns) in enumerate(((150, 3), (40, 90), (1, 0), (64, 33), (17, 146))):
        k, v = support.random_kv(2, tokens, seed=seed)
        valid = torch.arange(tokens) >= torch.tensor([[0], [tokens // 3]])
        support.feed(layer, k, v, valid)
        for row, one in enumerate(naive):
            one.append(k[row], v[row], valid[row].tolist())
            one.commit()
        if all(one.can_crop(columns) for one in naive):
            layer.crop(-columns)
            for one in naive:
                one.crop(columns)
                one.commit()
        else:
            with pytest.raises(ValueError, match="left the sliding window"):
                layer.crop(-columns)
        support.assert_layer(layer, naive)
        assert sum(layer.nbytes().values()) == support.allocated(layer)
    with pytest.raises(ValueError, match=f"holds only {layer.seen} columns"):
        layer.crop(-1000)


def test_pages_that_a_crop_frees_are_used_again() -> None:
    config, blocks = flat_config(block_size=32, recent_tokens=0), 36
    k, v = support.random_kv(2, FIRST + blocks * 32)
    layer, whole = support.filled(config, k, v), support.filled(config, k, v)
    for kept in (35, 34, 12, 0):
        # two pages of 72 are kept for the next blocks, more are given back
        layer.crop(FIRST + 35 * 32 - layer.seen)
        assert layer.pool.pages == 2 * blocks
        layer.crop(FIRST + kept * 32 - layer.seen)
        assert layer.pool.pages == 2 * (blocks if kept == 35 else kept)
        for at in range(FIRST + kept * 32, FIRST + blocks * 32, 32):
            support.feed(layer, k[:, :, at : at + 32], v[:, :, at : at + 32])
        for row in range(2):
            support.assert_same_rows(layer, row, whole, row)
        assert layer.pool.pages == 2 * blocks


def test_crop_takes_a_tensor_too() -> None:
    layer = support.filled(TurboConfig(), *support.random_kv(1, 20))
    layer.crop(torch.tensor(-3))  # type: ignore[arg-type]
    assert type(layer.get_seq_length()) is int
    assert layer.lengths() == [layer.seen] == [17]


def test_beams_share_pages_and_then_part() -> None:
    k, v = support.random_kv(1, FIRST + 128 + 64)
    layer = support.filled(TurboConfig(), k, v)
    layer.batch_repeat_interleave(3)
    assert layer.pool.pages == 2
    tail = support.random_kv(3, 70, seed=1)
    support.feed(layer, *tail)
    assert layer.pool.pages == 2 + 3
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert layer.pool.pages == 2 + 2
    for row, parent in enumerate((2, 2, 0)):
        own = [torch.cat((x, y[parent : parent + 1]), 2) for x, y in zip((k, v), tail, strict=True)]
        support.assert_same_rows(layer, row, support.filled(TurboConfig(), own[0], own[1]), 0)


def test_a_rolling_window_has_bounded_memory() -> None:
    layer, sizes = TurboLayer(TurboConfig(), 128), []
    for step in range(60):
        support.feed(layer, *support.random_kv(2, 33, seed=step))
        sizes.append(sum(layer.nbytes().values()))
    # two blocks of window, one more that is on its way out, one of open tokens; the table doubles
    most = support.HEADS * 2 * (3 * page_bytes(16, 4) + 64 * open_token_bytes(16)) + 2 * 8 * 4 + 2 * support.HEADS * 8
    assert max(sizes[10:]) <= most


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "bad"), [(0, torch.nan), (1, torch.inf), (0, -torch.inf), (1, torch.nan)])
@pytest.mark.parametrize("seen", [0, 20], ids=["prompt", "token"])
def test_nan_and_infinity_are_refused(seen: int, which: int, bad: float) -> None:
    layer = TurboLayer(TurboConfig(), index=7)
    if seen:
        support.feed(layer, *support.random_kv(1, seen))
    new = support.random_kv(1, 2, seed=1)
    new[which][0, 1, 1, 3] = bad
    with pytest.raises(ValueError, match="layer 7: keys or values hold NaN or Inf"):
        support.feed(layer, *new)
    assert layer.seen == seen
    if seen:
        # the pass left no trace
        clean = TurboLayer(TurboConfig())
        for one in (layer, clean):
            if one is clean:
                support.feed(one, *support.random_kv(1, seen))
            support.feed(one, *support.random_kv(1, 3, seed=2))
        support.assert_same_rows(layer, 0, clean, 0)


@pytest.mark.parametrize("which", [0, 1])
def test_numbers_that_32_bit_cannot_hold_are_refused(which: int) -> None:
    layer, new = TurboLayer(TurboConfig(), index=7), [x.double() for x in support.random_kv(1, 2)]
    new[which][0, 1, 1, 3] = 1e300
    with pytest.raises(ValueError, match="layer 7: keys or values hold NaN or Inf"):
        support.feed(layer, *new)


def test_keys_and_values_of_unlike_shape_are_refused() -> None:
    layer = TurboLayer(TurboConfig(), index=4)
    with pytest.raises(ValueError, match=r"layer 4: keys \(1, 3, 3, 32\) and values \(1, 3, 3, 16\) differ"):
        layer.update(support.random_kv(1, 3, 32)[0], support.random_kv(1, 3, 16)[1])
    k, v = support.random_kv(1, 3, 32)
    for wrong in ((k[0], v), (k, v[0]), (k[None], v)):
        with pytest.raises(ValueError, match=r"layer 4: (key|value)_states must be \[B, H, M, D\]; got shape"):
            layer.update(*wrong)
    with pytest.raises(ValueError, match=r"layer 4: key_states must be float16.* got torch\.int32"):
        layer.update(k.int(), v)
    with pytest.raises(ValueError, match="head dim 24"):
        layer.update(*support.random_kv(1, 3, 24))
