"""The rows, windows and masks of a `TurboLayer`, and what it refuses."""

import copy
from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_turn
from budgets import check_exact, check_turbo
from hypothesis import given
from hypothesis import strategies as st
from layer_support import HEADS, assert_same_rows, feed, filled, random_kv
from op_calls import decode
from prefill_support import int8_queries
from stores import store_codes

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.new_columns import NewColumns, columns_from_mask, columns_of
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import open_token_bytes, page_bytes

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


@in_turn(window=[1, 63, 64, 65, 65, 200], mode=["fp16", "turbo"])
def test_a_rolling_window_loses_no_visible_token(window: int, mode: str, device: torch.device) -> None:
    k, v = (x.to(device) for x in random_kv(2, 500))
    rolled, whole = TurboLayer(TurboConfig(), window), TurboLayer(TurboConfig())
    at = 0
    for tokens in (300, 7, 64, *[1] * 16, 113):
        part = slice(at, at + tokens)
        for layer in (rolled, whole):
            layer.append(k[:, :, part], v[:, :, part], NewColumns(tokens))
        at += tokens
        if tokens <= DECODE_TOKENS:
            # as in a pass: attention reads the cache before it is committed
            q = torch.randn(2, 2 * HEADS, tokens, 16, device=device)
            got = decode(q, rolled.kv_store(), scaling=0.3, window=window, mode=mode)
            rows = store_codes(whole.kv_store())
            if mode == "fp16":
                check_exact(got, q, [row.values() for row in rows], scaling=0.3, window=window)
            else:
                check_turbo(got, int8_queries(q, [0] * len(q)), q.dtype, rows, scaling=0.3, window=window)
        rolled.commit()
        whole.commit()
        assert max(rolled.lengths()) < window - 1 + 64
    assert rolled.state.dropped[0] > 0
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


# --- refusals ------------------------------------------------------------------------------------------------------


@all_pairs(
    seen=[pytest.param(0, id="prompt"), pytest.param(20, id="token")],
    which=[pytest.param(0, id="keys"), pytest.param(1, id="values")],
    bad=[torch.nan, torch.inf, -torch.inf],
    scale=["token", "universal"],
)
def test_nan_and_infinity_are_refused(seen: int, which: int, bad: float, scale: Any) -> None:
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
    with pytest.raises(ValueError, match="holds 2 rows of 3 heads of 16 channels; this pass brings 3 of 3"):
        feed(layer, *random_kv(3, 1))
    with pytest.raises(ValueError, match="holds 2 rows of 3 heads of 16 channels; this pass brings 2 of 4"):
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
    chunk = columns_of(valid)
    starts = chunk.starts or [0] * len(rows)
    assert [chunk.tokens - start for start in starts] == valid.sum(-1).tolist()
    x = torch.arange(1.0, 7.0).expand(len(rows), 2, 6)[..., None]
    aligned = chunk.align(x)
    for row, real in enumerate(valid):
        tokens = x[row, :, real]
        assert torch.equal(aligned[row, :, 6 - tokens.shape[1] :], tokens)
    assert torch.equal(chunk.restore(aligned), x)
    if valid.all():
        assert chunk == NewColumns(6)


def test_a_mask_that_contradicts_the_cache_is_refused() -> None:
    stored = torch.tensor([[0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    assert columns_from_mask(mask, 3, 2, stored).starts == [1, 0]
    assert columns_from_mask(torch.ones(2, 5), 3, 2, None) == NewColumns(2)
    with pytest.raises(ValueError, match="attention_mask has 2 columns; the cache holds 3 and this pass brings 2"):
        columns_from_mask(mask[:, 3:], 3, 2, stored)
    for past in (None, ~stored):
        with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
            columns_from_mask(mask, 3, 2, past)
    # no mask shows every column, so it contradicts a cache that left some out
    assert columns_from_mask(None, 3, 2, stored[1:]) == NewColumns(2)
    with pytest.raises(ValueError, match="none means all ones"):
        columns_from_mask(None, 3, 2, stored)


@pytest.mark.parametrize("bits", [8, 4])
def test_float16_keys_at_the_end_of_the_range_come_back_finite(bits: int) -> None:
    k, v = (x.half() for x in random_kv(1, 130))
    k[..., 3], k[..., 5] = 65504.0, -65504.0
    layer = filled(TurboConfig(bits=bits), k, v)
    assert all(bool(x.isfinite().all()) for x in layer.dequantized(130))
