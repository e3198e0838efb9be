"""`prefill` against the float64 oracle: prompts, chunks over a compressed past, padding, windows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_support import check_prefill, int8_queries
from support import SLACK, check, check_same, largest, make_store, oracle, tokens

from turbo_hf.config import ATTENTION_MODES
from turbo_hf.layout import BITS, SCORE_LIMIT, AttentionOutput, KVStore
from turbo_hf.ops.operands import quantize_operands
from turbo_hf.ops.prefill import prefill
from turbo_hf.reference import flash

pytestmark = pytest.mark.usefixtures("poison")

MODES = [pytest.param(mode, id=mode) for mode in ATTENTION_MODES]
LENGTHS = [pytest.param(n, id=f"n{n}") for n in (1, 63, 64, 65, 130)]
DTYPES = [
    pytest.param(dtype, id=str(dtype).removeprefix("torch."))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
]
OPTIONS = [
    pytest.param({"window": 1}, id="window1"),
    pytest.param({"window": 20}, id="window20"),
    pytest.param({"window": 64}, id="window64"),
    pytest.param({"window": 100}, id="window100"),
    pytest.param({"window": 1000}, id="window1000"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"causal": False}, id="full"),
    pytest.param({"causal": False, "window": 20}, id="full-window20"),
    pytest.param({"window": 70, "softcap": 5.0, "sinks": True}, id="all"),
]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    batch: int, m: int, device: torch.device, *, heads: int = 4, kv_heads: int = 2, dim: int = 64, **how: Any
) -> Inputs:
    q = tokens(batch, heads, m, dim, device=device, **how)
    k, v = (tokens(batch, kv_heads, m, dim, device=device, **how) for _ in range(2))
    return q, k, v


def random_past(lengths: Sequence[int], like: torch.Tensor, **how: Any) -> KVStore:
    """A cache of rows of these lengths, of the heads and head dim of k."""
    shape = (len(lengths), like.shape[1], max(1, *lengths), like.shape[3])
    k, v = (tokens(*shape, device=like.device) for _ in range(2))
    return make_store(k, v, lengths, **how)


# --- a prompt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, length, device), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        pytest.param(2, 2, id="gqa1:1"),
        pytest.param(8, 2, id="gqa4:1"),
        pytest.param(14, 2, id="gqa7:1"),
        pytest.param(4, 1, id="mqa"),
    ],
)
def test_head_groups(heads: int, kv_heads: int, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, 65, device, heads=heads, kv_heads=kv_heads), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [pytest.param(d, id=f"d{d}") for d in (16, 64, 80, 96, 128)])
def test_head_dims(dim: int, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(1, 65, device, dim=dim), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [pytest.param(b, id=f"b{b}") for b in (32, 64, 128)])
def test_block_sizes(block: int, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, 150, device), mode, block=block, starts=[0, 100])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(1, 70, device, dtype=dtype), mode, sinks=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: dict[str, Any], mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, 130, device), mode, starts=[0, 60], **options)


@pytest.mark.parametrize("mode", MODES)
def test_scaling_is_the_models(mode: str, device: torch.device) -> None:
    check_prefill(*inputs(1, 65, device), mode, scaling=0.03)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [pytest.param(True, id="causal"), pytest.param(False, id="full")])
def test_padding_is_neither_read_nor_written(causal: bool, mode: str, device: torch.device) -> None:
    """Rows of one token, of none, of all; what lies under padding may be anything."""
    q, k, v = inputs(5, 70, device)
    starts = [0, 69, 70, 6, 33]
    for x in (q, k, v):
        for row, start in enumerate(starts):
            x[row, :, :start] = torch.nan
    got = check_prefill(q, k, v, mode, starts=starts, causal=causal, sinks=True)
    assert bool(got.lse[2].isneginf().all())
    assert not got.out[2].any()


@pytest.mark.parametrize("mode", MODES)
def test_strides_do_not_matter(mode: str, device: torch.device) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(2, 65, device))
    got = check_prefill(q, k, v, mode)
    plain = prefill(q.contiguous(), k.contiguous(), v.contiguous(), scaling=0.125, mode=mode)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e2, 3e2, 1e3, 1e4, 1e6], ids="scores{:g}".format)
def test_scores_of_any_size(size: float, mode: str, device: torch.device) -> None:
    """One key takes all of P, or all keys the same share, without a NaN and with lse as large as the scores.

    Scores of which INT8 tells nothing are not left to it.
    """
    q, k, v = inputs(1, 130, device)
    options: dict[str, Any] = {"scaling": 1.0, "sinks": torch.zeros(4, device=device), "past": random_past([70], k)}
    if size < 1e3:
        check_prefill(size * q, k, v, mode, scaling=1.0)
        check_prefill(size * q, k, v, mode, **options)
        return
    exact = check_prefill(size * q, k, v, "fp16", **options)
    out = prefill(size * q, k, v, mode=mode, **options)
    wild = (exact.lse.abs() > SCORE_LIMIT).any(-1)
    # at 1e3 some heads pass the limit, beyond it all do
    assert wild.any()
    assert wild.all() or size == 1e3
    for got, want in zip(out, exact, strict=True):
        assert torch.equal(got[wild], want[wild])


@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_zeros(mode: str, device: torch.device) -> None:
    """Scales of 0 must not divide anything."""
    q, k, v = inputs(1, 150, device)
    k[:, :, :64], v[:, :, 64:128], q[:, :, 128:] = 0, 0, 0
    check_prefill(q, k, v, mode, block=64)


@pytest.mark.parametrize("mode", MODES)
def test_one_huge_value(mode: str, device: torch.device) -> None:
    """An outlier costs its own block its precision, as the budget knows, and no other block."""
    q, k, v = inputs(1, 130, device)
    k[0, 0, 70, 3], v[0, 1, 70, 3] = 1e4, -1e4
    check_prefill(q, k, v, mode)


# --- a chunk over a past --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_past_of_any_length(length: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(1, 20, device)
    check_prefill(q, k, v, mode, past=random_past([length], k))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_ragged_past(options: dict[str, Any], mode: str, device: torch.device) -> None:
    """Rows whose pasts and chunks have every kind of length, none among them."""
    q, k, v = inputs(5, 66, device)
    past = random_past([130, 0, 64, 3, 90], k, groups=((4, 1), (2, 1)))
    check_prefill(q, k, v, mode, past=past, starts=[0, 1, 66, 65, 20], **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [pytest.param(bits, id=f"{bits}bit") for bits in BITS])
@pytest.mark.parametrize("dim", [pytest.param(d, id=f"d{d}") for d in (16, 80, 128)])
def test_a_past_of_any_bits(dim: int, bits: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(2, 17, device, dim=dim)
    check_prefill(q, k, v, mode, past=random_past([70, 64], k, groups=((bits, 2),)))


@pytest.mark.parametrize("mode", MODES)
def test_a_past_of_mixed_bits_in_any_order(mode: str, device: torch.device) -> None:
    q, k, v = inputs(3, 17, device, heads=8, kv_heads=4)
    order = torch.stack([torch.randperm(4) for _ in range(3)])
    past = random_past([130, 64, 90], k, groups=((8, 1), (4, 2), (3, 1)), order=order)
    check_prefill(q, k, v, mode, past=past)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("past_block", "block"),
    [pytest.param(32, 32, id="32-32"), pytest.param(128, 128, id="128-128"), pytest.param(32, 64, id="32-64")],
)
def test_a_past_of_any_block_size(past_block: int, block: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(2, 70, device)
    check_prefill(q, k, v, mode, past=random_past([150, 40], k, block=past_block), block=block)


@pytest.mark.parametrize("mode", MODES)
def test_a_past_that_is_not_sealed_yet(mode: str, device: torch.device) -> None:
    q, k, v = inputs(2, 30, device)
    check_prefill(q, k, v, mode, past=random_past([150, 140], k, sealed=[0, 1]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_over_a_past(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    q, k, v = inputs(1, 30, device, dtype=dtype)
    check_prefill(q, k, v, mode, past=random_past([100], k))


@settings(max_examples=150)
@given(data=st.data())
def test_any_prefill(data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.integers(1, 4), "group")
    block, dim = data.draw(st.sampled_from((32, 64)), "block"), data.draw(st.sampled_from((16, 32, 48)), "dim")
    m = data.draw(st.integers(1, 100), "m")
    starts = data.draw(st.lists(st.integers(0, m), min_size=1, max_size=3), "starts")
    options: dict[str, Any] = {
        "window": data.draw(st.none() | st.integers(1, 160), "window"),
        "softcap": data.draw(st.none() | st.sampled_from((1.0, 30.0)), "softcap"),
        "sinks": data.draw(st.none() | st.just(True), "sinks"),
        "causal": data.draw(st.booleans(), "causal"),
    }
    lengths = [data.draw(st.integers(0, 150), "past") for _ in starts]
    low = data.draw(st.integers(0, kv_heads), "low")
    widths = (data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(BITS)))
    groups = tuple((bits, n) for bits, n in zip(widths, (kv_heads - low, low), strict=True) if n)
    order = torch.tensor([data.draw(st.permutations(range(kv_heads)), "order") for _ in starts])
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    q, k, v = inputs(len(starts), m, torch.device("cpu"), heads=kv_heads * group, kv_heads=kv_heads, dim=dim)
    past = None
    if data.draw(st.booleans(), "has past"):
        past = random_past(lengths, k, groups=groups, order=order, block=block)
    mode = data.draw(st.sampled_from(ATTENTION_MODES), "mode")
    check_prefill(q, k, v, mode, past=past, starts=starts, block=block, **options)


# --- what is the same must come out the same ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_the_same_alone_and_in_a_batch(mode: str, device: torch.device) -> None:
    """Padding is cut off before blocks are formed, so that it moves no block's edge and no scale."""
    q, k, v = inputs(3, 100, device)
    lengths, starts = [130, 0, 64], [0, 37, 99]
    old_k, old_v = tokens(3, 2, 130, 64, device=device), tokens(3, 2, 130, 64, device=device)
    past = make_store(old_k, old_v, lengths)
    options: dict[str, Any] = {"scaling": 0.125, "mode": mode}
    batch = prefill(q, k, v, past=past, starts=torch.tensor(starts, device=device), **options)
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        alone_past = make_store(old_k[one], old_v[one], [lengths[row]]) if lengths[row] else None
        alone = prefill(*(x[one, :, start:] for x in (q, k, v)), past=alone_past, **options)
        check_same(AttentionOutput(batch.out[one, :, start:], batch.lse[one, :, start:]), alone, largest(v))


@pytest.mark.parametrize("mode", MODES)
def test_later_tokens_do_not_change_earlier_ones(mode: str, device: torch.device) -> None:
    """Whole blocks only: tokens that join a block change its scale."""
    q, k, v = inputs(2, 190, device)
    long = prefill(q, k, v, scaling=0.125, mode=mode)
    short = prefill(*(x[:, :, :128] for x in (q, k, v)), scaling=0.125, mode=mode)
    check_same(AttentionOutput(long.out[:, :, :128], long.lse[:, :, :128]), short, largest(v))


@pytest.mark.parametrize("mode", MODES)
def test_a_past_without_tokens_is_no_past(mode: str, device: torch.device) -> None:
    q, k, v = inputs(2, 70, device)
    empty = make_store(k, v, [0, 0])
    for a, b in zip(
        prefill(q, k, v, scaling=0.125, mode=mode, past=empty), prefill(q, k, v, scaling=0.125, mode=mode), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [pytest.param(True, id="causal"), pytest.param(False, id="full")])
def test_query_tiles_do_not_change_the_result(causal: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over query tiles bounds memory; a causal tile also leaves out the keys behind it."""
    q, k, v = inputs(3, 150, torch.device("cpu"))
    options: dict[str, Any] = {"scaling": 0.125, "mode": mode, "causal": causal, "window": 90}
    options |= {"past": random_past([100, 0, 64], k), "starts": torch.tensor([0, 20, 149])}
    whole = prefill(q, k, v, **options)
    # 3 rows x 4 heads x (128 past + 192 new) keys: 7 queries at a time
    monkeypatch.setitem(flash.TILE_ELEMENTS, "cpu", 7 * 3 * 4 * 320)
    check_same(prefill(q, k, v, **options), whole, largest(v))


def test_a_chunk_in_8_bit_misses_no_more_than_its_rounding(device: torch.device) -> None:
    """The INT8 computation as a whole against attention on the numbers that the model gave.

    With |q . k| off by the half steps of both factors, P is off by a factor of e^(2 delta) at most.
    """
    q, k, v = inputs(1, 130, device, heads=2)
    got = prefill(q, k, v, scaling=0.125)
    want = oracle(q, [(k[0], v[0])], scaling=0.125)
    parts = quantize_operands(k, v, mode="turbo", backend="reference")
    q8 = int8_queries(q, [0])
    k8 = (parts.k.double() * parts.k_scale.double().repeat_interleave(128, -1)[..., None])[:, :, :130].cpu()
    # |q . k - q8 . k8| <= |q - q8| . |k| + |q8| . |k - k8|, with the real differences
    dq, dk = (q.cpu().double() - q8).abs(), (k.cpu().double() - k8).abs()
    delta = 0.125 * float((dq @ k.cpu().double().abs().mT + q8.abs() @ dk.mT).max())
    values = largest(v)
    p_steps = 2 * values / 127 / 2 * 128 * float(torch.cat(want.probs).max())
    bound = (torch.tensor(2 * delta).expm1().item() + 1 / 127 / 2) * 2 * values + p_steps
    check("out", got.out, want.out, bound)
    check("lse", got.lse, want.lse, delta + SLACK * torch.finfo(torch.float32).eps * largest(want.lse))


# --- refusals -------------------------------------------------------------------------------------------------------


def zeros(**changed: torch.Tensor) -> dict[str, Any]:
    """Arguments of the smallest prefill, some of them changed."""
    return {name: torch.zeros(1, 2, 4, 16) for name in ("q", "k", "v")} | changed


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refuses_integers(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be float16, bfloat16, float32 or float64; got torch.int8"):
        prefill(**zeros(**{name: torch.zeros(1, 2, 4, 16, dtype=torch.int8)}), scaling=1.0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refuses_another_rank(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be \[B, H, M, D\]; got shape \(2, 4, 16\)"):
        prefill(**zeros(**{name: torch.zeros(2, 4, 16)}), scaling=1.0)


def test_refuses_head_dims_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match=r"k has head dim 24; packed blocks need a multiple of 16"):
        prefill(*(torch.zeros(1, 2, 4, 24) for _ in range(3)), scaling=1.0)


@pytest.mark.parametrize("shape", [pytest.param((1, 3, 4, 16), id="heads"), pytest.param((1, 2, 4, 32), id="dim")])
def test_refuses_queries_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"q must be \[B, Hq, M, 16\] with Hq a multiple of 2; got \(1, "):
        prefill(**zeros(q=torch.zeros(shape)), scaling=1.0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("k", (2, 2, 4, 16), id="k-rows"),
        pytest.param("k", (1, 2, 5, 16), id="k-tokens"),
        pytest.param("v", (1, 1, 4, 16), id="v-heads"),
        pytest.param("v", (1, 2, 4, 32), id="v-dim"),
    ],
)
def test_refuses_keys_and_values_of_another_shape(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be \[B, Hkv, M, D\] with B, M and D of q \(1, 2, 4, 16\); got"):
        prefill(**zeros(**{name: torch.zeros(shape)}), scaling=1.0)


@pytest.mark.parametrize("name", ["k", "v"])
def test_refuses_another_dtype_or_device(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be torch.float32 on cpu like q; got torch.float16 on cpu"):
        prefill(**zeros(**{name: torch.zeros(1, 2, 4, 16, dtype=torch.float16)}), scaling=1.0)
    with pytest.raises(ValueError, match=rf"{name} must be torch.float32 on cpu like q; got torch.float32 on meta"):
        prefill(**zeros(**{name: torch.zeros(1, 2, 4, 16, device="meta")}), scaling=1.0)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 2, 4, 16), id="rows"),
        pytest.param((1, 1, 4, 16), id="heads"),
        pytest.param((1, 2, 4, 32), id="dim"),
    ],
)
def test_refuses_a_past_of_another_shape(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    past = make_store(x, x, [4] * shape[0])
    with pytest.raises(ValueError, match=r"past must hold B, Hkv and D of k \(1, 2, 4, 16\) on cpu; it holds "):
        prefill(**zeros(), scaling=1.0, past=past)


def test_refuses_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"mode must be one of turbo, int8, half, fp8, fp16; got 'fast'"):
        prefill(**zeros(), scaling=1.0, mode="fast")


def test_refuses_other_block_sizes() -> None:
    with pytest.raises(ValueError, match=r"block must be one of 32, 64, 128 tokens; got 16"):
        prefill(**zeros(), scaling=1.0, block=16)


def test_refuses_starts_of_another_batch() -> None:
    with pytest.raises(ValueError, match=r"starts must be \[B\] = \[1\]; got \(2,\)"):
        prefill(**zeros(), scaling=1.0, starts=torch.zeros(2, dtype=torch.int64))


def test_refuses_sinks_of_other_heads() -> None:
    with pytest.raises(ValueError, match=r"sinks must be \[Hq\] = \[2\]; got \(3,\)"):
        prefill(**zeros(), scaling=1.0, sinks=torch.zeros(3))
