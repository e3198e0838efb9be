"""A cache read back, and what quantization refuses."""

import pytest
import torch
from all_pairs import in_one_test
from hypothesis import given
from hypothesis import strategies as st
from op_calls import quantize_tokens
from quantize_support import ALL_BITS, STAGE_2
from stores import make_store, store_codes, tokens

from turbo_hf.config.expected import FLOATS
from turbo_hf.layout import BITS, HeadGroups, KVStore
from turbo_hf.ops.store.quantize import check_float, dequantize, head_scores

pytestmark = pytest.mark.usefixtures("poison")


# --- a cache read back ----------------------------------------------------------------------------------------------


def assert_dequantized(store: KVStore, dtype: torch.dtype) -> None:
    """`dequantize` is, to the bit, what the pages and open tokens say, and 0 past each row's end."""
    k, v = dequantize(store, dtype)
    rows = store_codes(store)
    assert k.dtype == v.dtype == dtype
    assert k.shape[:2] == store.k_open.shape[:2]
    assert k.shape[2] >= max(row.k.shape[1] for row in rows)
    for i, row in enumerate(rows):
        length = row.k.shape[1]
        for got, codes, scale in ((k[i], row.k, row.k_scale), (v[i], row.v, row.v_scale)):
            want = (codes.float() * scale.float()[..., None]).to(dtype)
            assert torch.equal(got[:, :length].cpu(), want)
            assert not got[:, length:].any()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_dequantize_ragged_rows(bits: int, device: torch.device) -> None:
    k, v = tokens(6, 3, 200, 32, device=device), tokens(6, 3, 200, 32, device=device)
    for dtype in FLOATS:
        assert_dequantized(make_store(k, v, [200, 1, 63, 64, 65, 0], groups=((bits, 3),)), dtype)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(((4, 4),), id="4"),
        pytest.param(((4, 2), (2, 2)), id="4+2"),
        pytest.param(((8, 1), (3, 3)), id="8+3"),
        pytest.param(((8, 1), (4, 1), (3, 1), (2, 1)), id="8+4+3+2"),
        pytest.param((((4, 2), 2), ((8, 3), 1), ((3, 2), 1)), id="4/2+8/3+3/2"),
        pytest.param((((2, 8), 1), ((2, 3), 1), ((3, 4), 2)), id="2/8+2/3+3/4"),
    ],
)
def test_dequantize_heads_in_any_order(groups: HeadGroups, device: torch.device) -> None:
    k, v = tokens(3, 4, 130, 32, device=device), tokens(3, 4, 130, 32, device=device)
    order = torch.stack([torch.randperm(4) for _ in range(3)])
    assert_dequantized(make_store(k, v, [130, 64, 90], groups=groups, order=order), torch.float32)


@pytest.mark.parametrize("block", [pytest.param(b, id=f"b{b}") for b in (32, 64, 128)])
def test_dequantize_blocks_of_any_size_and_open_tokens_beyond_one(block: int, device: torch.device) -> None:
    k, v = tokens(2, 2, 300, 16, device=device), tokens(2, 2, 300, 16, device=device)
    assert_dequantized(make_store(k, v, [300, 140], block=block), torch.float32)
    # while tokens may still be taken back, whole blocks stay open
    assert_dequantized(make_store(k, v, [300, 140], block=block, sealed=[0, 1]), torch.float32)


def test_tables_may_be_wider_than_any_row(device: torch.device) -> None:
    """Page 0 stands where a row has no block; it may hold anything."""
    k, v = tokens(2, 2, 130, 16, device=device), tokens(2, 2, 130, 16, device=device)
    store = make_store(k, v, [130, 70])
    assert_dequantized(store._replace(table=torch.nn.functional.pad(store.table, (0, 2))), torch.float32)


def test_rows_may_share_pages(device: torch.device) -> None:
    k, v = tokens(1, 2, 200, 16, device=device), tokens(1, 2, 200, 16, device=device)
    one = make_store(k, v, [200])
    twice = torch.tensor([0, 0], device=device)
    both = one._replace(
        **{
            name: getattr(one, name)[twice]
            for name in ("order", "table", "sealed", "k_open", "v_open", "k_scale", "v_scale", "open_len")
        }
    )
    assert_dequantized(both, torch.float32)


def test_dequantize_a_cache_without_tokens(device: torch.device) -> None:
    x = tokens(2, 2, 4, 16, device=device)
    k, v = dequantize(make_store(x, x, [0, 0]), torch.float32)
    assert k.shape == v.shape == (2, 2, 0, 16)


@pytest.mark.parametrize("bits", STAGE_2)
def test_values_at_the_end_of_the_range_stay_finite(bits: int, device: torch.device) -> None:
    """A rounded step reaches beyond the largest code; what it stands for must not become an infinity."""
    for dtype in FLOATS:
        top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        x = torch.full((1, 1, 64, 16), top, dtype=dtype, device=device)
        x[:, :, ::2] *= -1
        for y in dequantize(make_store(x, -x, [64], groups=((bits, 1),)), dtype):
            assert bool(y.isfinite().all())


def test_open_tokens_keep_their_stage_1_codes(device: torch.device) -> None:
    x = tokens(2, 2, 40, 16, device=device)
    k, v = dequantize(make_store(x, 2 * x, [40, 40]), torch.float32)
    codes, scale = quantize_tokens(x)
    assert torch.equal(k[:, :, :40], codes * scale[..., None])
    assert torch.equal(v[:, :, :40], codes * (2 * scale)[..., None])


@given(data=st.data())
def test_any_cache_reads_back(data: st.DataObject) -> None:
    heads, block = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((32, 64)))
    lengths = data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=3))
    cut = data.draw(st.integers(0, heads))
    widths = data.draw(st.lists(st.sampled_from(BITS), min_size=2, max_size=2))
    groups = tuple((bits, n) for bits, n in zip(widths, (cut, heads - cut), strict=True) if n)
    order = torch.tensor([data.draw(st.permutations(range(heads))) for _ in lengths])
    torch.manual_seed(data.draw(st.integers(0, 99)))
    k, v = (tokens(len(lengths), heads, 140, 16) for _ in range(2))
    assert_dequantized(make_store(k, v, lengths, groups=groups, order=order, block=block), torch.float32)


# --- refusals -------------------------------------------------------------------------------------------------------


@in_one_test(
    ("x", "message"),
    [
        (torch.zeros(1, 1, 1, 16, dtype=torch.int64), "must be float16, bfloat16, float32 or float64; got torch.int64"),
        (torch.zeros(1, 1, 16), r"must be \[B, H, M, D\]; got shape \(1, 1, 16\)"),
        (torch.zeros(1, 1, 1, 24), "has head dim 24; .*multiple of 16.*uncompressed_layers"),
        (torch.zeros(1, 1, 1, 0), "has head dim 0; .*multiple of 16.*uncompressed_layers"),
    ],
)
def test_what_is_quantized_has_a_form(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"x {message}"):
        check_float("x", x)


def test_dequantize_refuses_integers() -> None:
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match=r"dtype must be float16, bfloat16, float32 or float64; got torch.int8"):
        dequantize(make_store(x, x, [4]), torch.int8)


def test_head_scores_refuse_an_unknown_metric() -> None:
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match=r"metric must be one of priority, entropy, min_max, variation; got 'range'"):
        head_scores(x, x, "range")


@pytest.mark.parametrize("name", ["k", "v"])
def test_head_scores_refuse_what_is_no_float(name: str) -> None:
    given = {"k": torch.zeros(1, 1, 4, 16), "v": torch.zeros(1, 1, 4, 16)}
    given[name] = given[name].to(torch.int8)
    with pytest.raises(ValueError, match=rf"{name} must be float16"):
        head_scores(given["k"], given["v"], "priority")
