"""Both stages of quantization, their contract and their kernels; heads ranked."""

import math
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from all_pairs import all_pairs, in_one_test, in_turn
from quantize_support import ALL_BITS, DTYPES, STAGE_2, ones
from stores import CODE_MAX, page_codes, tokens, unpack

from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.layout import BITS, VALUE_ORDER, PagedHeads, Width
from turbo_hf.ops.store.quantize import head_scores, quantize_tokens, seal_blocks, unpack_blocks

pytestmark = pytest.mark.usefixtures("poison")
DIMS = [pytest.param(d, id=f"d{d}") for d in (16, 64, 80, 96, 128)]
EPS = torch.finfo(torch.float32).eps
METRICS = [pytest.param(metric, id=metric) for metric in HEAD_METRICS]


# --- stage 1 --------------------------------------------------------------------------------------------------------


def assert_stage_1(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """INT8 of x [B, H, M, D], one scale per token: smallest scales, nearest codes, half a step lost."""
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert codes.shape == x.shape
    assert scale.shape == x.shape[:3]
    codes, step, x = codes.double(), scale.double()[..., None], x.double()
    want = x.abs().amax(-1) / CODE_MAX
    # one division in float32
    assert bool(((step[..., 0] - want).abs() <= EPS * want).all())
    assert float(codes.abs().max()) <= CODE_MAX
    # away from ties, where the float32 quotient may round the other way
    ratio = x / step.clamp(min=torch.finfo(torch.float32).tiny)
    clear = (ratio - ratio.floor() - 0.5).abs() > 2**-10
    assert torch.equal(codes[clear], ratio.round()[clear])
    # the quotient's rounding, and that of a float64 input on its way to float32
    assert bool(((codes * step - x).abs() <= step / 2 + 2 * EPS * x.abs()).all())


@in_turn(dim=DIMS, dtype=DTYPES)
def test_tokens_are_off_by_half_a_step(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = tokens(2, 3, 65, dim, dtype=dtype, device=device)
    codes, scale = quantize_tokens(x)
    assert_stage_1(x, codes, scale)
    assert bool((codes.long().abs().amax(-1) == CODE_MAX).all())


def test_strides_do_not_matter_to_stage_1(device: torch.device) -> None:
    x = tokens(2, 65, 3, 64, device=device).transpose(1, 2)
    for got, want in zip(quantize_tokens(x), quantize_tokens(x.contiguous()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("size", [0.0, 1e-26, 1e-37, 1e-43])
def test_zero_tokens_have_scale_0_and_code_0(size: float, device: torch.device) -> None:
    """So do those that are next to nothing, by which nothing can be divided."""
    x = tokens(1, 2, 70, 16, device=device)
    x[:, :, 64:] *= size
    x[:, 1, 3] *= size
    codes, scale = quantize_tokens(x)
    assert bool(scale.isfinite().all())
    assert not codes[:, :, 64:].any()
    assert not codes[:, 1, 3].any()
    assert not scale[:, :, 64:].any()


def test_a_given_scale_is_used_and_clamps(device: torch.device) -> None:
    x = tokens(2, 3, 5, 16, device=device)
    own = quantize_tokens(x)[1]
    given = torch.full_like(own, float(own.mean()) / 2)
    codes, scale = quantize_tokens(x, given)
    assert torch.equal(scale, given)
    ratio = x.double() / given.double()[..., None]
    # away from ties, where the float32 quotient may round the other way
    clear = (ratio - ratio.floor() - 0.5).abs() > 2**-10
    assert torch.equal(codes[clear].double(), ratio.round().clamp(-CODE_MAX, CODE_MAX)[clear])
    assert bool((ratio.abs() > CODE_MAX + 1).any()), "nothing was clamped: the test shows nothing"
    assert int(codes.long().abs().max()) == CODE_MAX


# --- stage 2 --------------------------------------------------------------------------------------------------------


def slow_stage_2(channel: list[int], bits: int) -> tuple[int, int, list[int]]:
    """Step, zero and codes of one channel of a block, in integers and fractions."""
    levels, low, high = 2**bits - 1, min(channel), max(channel)
    step = max(1, round(Fraction(high - low, levels)))
    zero = max(-128, low + (high - low - levels * step) // 2)
    return step, zero, [min(max(round(Fraction(q - zero, step)), 0), levels) for q in channel]


def channels_of(shape: tuple[int, ...], span: int = CODE_MAX) -> torch.Tensor:
    """int8 [P, S, b, D] whose channels have all kinds of ranges."""
    low = torch.randint(-span, span + 1, (*shape[:2], 1, shape[3]))
    high = torch.randint(-span, span + 1, (*shape[:2], 1, shape[3]))
    return (low + torch.rand(shape) * (high - low)).round().to(torch.int8)


@in_one_test("block", [pytest.param(b, id=f"b{b}") for b in (32, 64, 128)])
@in_one_test("bits", STAGE_2)
def test_stage_2_is_its_formula_bit_for_bit(bits: int, block: int, device: torch.device) -> None:
    k, v = channels_of((2, 2, block, 16)).to(device), channels_of((2, 2, block, 16)).to(device)
    pages = seal_blocks(k, ones(k), v, ones(v), bits)
    assert pages.bits == bits
    time_order = [VALUE_ORDER.index(t % 16) + t // 16 * 16 for t in range(block)]
    for page in range(2):
        for slot in range(2):
            k_codes = unpack(pages.k[page, slot], bits)
            v_codes = unpack(pages.v[page, slot], bits)[:, time_order].T
            meta = pages.meta[page, slot].tolist()
            for c in range(16):
                step, zero, codes = slow_stage_2(k[page, slot, :, c].tolist(), bits)
                assert (meta[0][c], meta[1][c], k_codes[:, c].tolist()) == (step, zero, codes)
                step, zero, codes = slow_stage_2(v[page, slot, :, c].tolist(), bits)
                assert (meta[2][c], meta[3][c], v_codes[:, c].tolist()) == (step, zero, codes)


@in_one_test("span", [pytest.param(CODE_MAX, id="fresh"), pytest.param(127, id="unsealed-once")])
@in_one_test("bits", STAGE_2)
def test_stage_2_of_every_range(bits: int, span: int, device: torch.device) -> None:
    """Each pair of a channel's smallest and largest code, with the codes between, at the error that steps allow.

    Codes to +-127 come from blocks that were sealed before: a value may round past the range of its block.
    """
    low, high = torch.triu_indices(2 * span + 1, 2 * span + 1) - span
    width = -len(low) % 16
    low, high = (torch.nn.functional.pad(x, (0, width)) for x in (low, high))
    parts = torch.linspace(0, 1, 128)[:, None]
    k = (low + parts * (high - low)).round().to(torch.int8)[None, None].to(device)
    pages = seal_blocks(k, ones(k), k, ones(k), bits)
    step, zero, v_step, v_zero = pages.meta[0, 0].cpu().long()
    assert torch.equal(step, v_step)
    assert torch.equal(zero, v_zero)
    assert int(step.min()) >= 1
    levels = 2**bits - 1
    if span == CODE_MAX:
        # nothing overflows INT8, so that a kernel may do without the clamp
        assert int(zero.min()) >= -128
        assert int((zero + levels * step).max()) <= 127
    back = unpack_blocks(pages)
    # what a rounded step does not cover is shared by both ends
    beyond = (high - low - levels * step).clamp(min=0)
    bound = torch.maximum(step / 2, (beyond + 1) // 2)
    for got in back:
        assert got.dtype == torch.int8
        error = (got.cpu()[0, 0].long() - k.cpu()[0, 0].long()).abs()
        assert bool((error <= bound).all()), f"worst {int((error - bound).max())} above its bound"


@pytest.mark.parametrize("bits", STAGE_2)
def test_constant_channels_are_exact(bits: int, device: torch.device) -> None:
    k = (torch.arange(240) - 120).clamp(-CODE_MAX, CODE_MAX).to(torch.int8).expand(1, 1, 64, 240).to(device)
    for got in unpack_blocks(seal_blocks(k, ones(k), k, ones(k), bits)):
        assert torch.equal(got, k)


@pytest.mark.parametrize("bits", STAGE_2)
def test_a_channel_with_no_more_values_than_levels_is_exact(bits: int, device: torch.device) -> None:
    k = (torch.arange(64) % 2**bits + 40).to(torch.int8)[None, None, :, None].expand(1, 1, 64, 16).to(device)
    for got in unpack_blocks(seal_blocks(k, ones(k), k, ones(k), bits)):
        assert torch.equal(got, k)


@all_pairs(dim=DIMS[::2], bits=ALL_BITS)
def test_sealing_tokens_costs_no_more_than_their_steps(dim: int, bits: int, device: torch.device) -> None:
    x = tokens(3, 2, 64, dim, device=device)
    x[0, 0, 9] *= 1000  # one token takes its block's range
    x[1] = 0
    k, k_scale = quantize_tokens(x)
    v, v_scale = quantize_tokens(7 * x.flip(-1))
    pages = seal_blocks(k, k_scale, v, v_scale, bits)
    whole = unpack_blocks(seal_blocks(k, k_scale, v, v_scale, 8))
    back = unpack_blocks(pages)
    for i, (want, scale) in enumerate(((x, k_scale), (7 * x.flip(-1), v_scale))):
        assert torch.equal(pages.scale[..., i], scale.amax(-1))
        steps = torch.full((3, 2, 1, dim), 0.5, dtype=torch.float64, device=device)  # stage 1 under the block's scale
        if bits != 8:
            span = (whole[i].double().amax(-2) - whole[i].double().amin(-2))[:, :, None]
            step = pages.meta[:, :, 2 * i].double()[:, :, None]
            steps = steps + torch.maximum(step / 2, ((span - (2**bits - 1) * step).clamp(min=0) / 2).ceil())
        block_scale = pages.scale[..., i].double()[..., None, None]
        bound = steps * block_scale + scale.double()[..., None] / 2 + 4 * EPS * want.double().abs()
        assert bool(((back[i].double() * block_scale - want.double()).abs() <= bound).all())


def test_blocks_of_one_scale_keep_their_8_bit_codes(device: torch.device) -> None:
    k, v = (torch.randint(-CODE_MAX, CODE_MAX + 1, (3, 2, 64, 80), dtype=torch.int8, device=device) for _ in range(2))
    scale = torch.rand(3, 2, 1, device=device).expand(3, 2, 64)
    pages = seal_blocks(k, scale, v, scale, 8)
    back = unpack_blocks(pages)
    assert torch.equal(back[0], k)
    assert torch.equal(back[1], v)
    assert torch.equal(pages.scale[..., 0], scale[..., 0])
    for position in range(64):
        token = position // 16 * 16 + VALUE_ORDER[position % 16]
        assert torch.equal(pages.v[..., position], v[:, :, token])


@pytest.mark.parametrize("bits", ALL_BITS)
def test_sealing_takes_any_strides(bits: int, device: torch.device) -> None:
    k = channels_of((2, 64, 3, 32)).transpose(1, 2).to(device)
    v = channels_of((3, 2, 64, 32)).transpose(0, 1).to(device)
    scale = torch.rand(2, 64, 3, device=device).transpose(1, 2)
    got = seal_blocks(k, scale, v, scale, bits)
    want = seal_blocks(k.contiguous(), scale.contiguous(), v.contiguous(), scale.contiguous(), bits)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.equal(a, b)
    strided = PagedHeads(bits, *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in got[1:]))
    for a, b in zip(unpack_blocks(strided), unpack_blocks(got), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_pages_unpack_to_what_the_drawing_says(bits: int, device: torch.device) -> None:
    k = channels_of((2, 2, 32, 48)).to(device)
    v = channels_of((2, 2, 32, 48)).to(device)
    pages = seal_blocks(k, torch.rand(2, 2, 32, device=device), v, torch.rand(2, 2, 32, device=device), bits)
    got_k, got_v = unpack_blocks(pages)
    for page in range(2):
        for slot in range(2):
            want_k, want_v = page_codes(pages, page, slot)
            assert torch.equal(got_k[page, slot].cpu().long(), want_k)
            assert torch.equal(got_v[page, slot].cpu().long(), want_v)


def test_fewer_bits_cost_more(device: torch.device) -> None:
    x = tokens(1, 1, 64, 64, device=device)
    codes, scale = quantize_tokens(x)
    errors = []
    for bits in BITS:
        k, _ = unpack_blocks(seal_blocks(codes, scale, codes, scale, bits))
        errors.append(float((k * scale.amax() - x).square().mean()))
    assert errors == sorted(errors)
    assert len(set(errors)) == len(errors)


# --- heads ranked ---------------------------------------------------------------------------------------------------


def slow_score(x: list[list[float]], metric: str) -> float:
    """The score of one head, x [N][D]."""
    columns = list(zip(*x, strict=True))
    gaps = [max(c) - min(c) for c in columns]
    span = max(max(c) for c in columns) - min(min(c) for c in columns)
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    entropy = -sum(g / sum(gaps) * math.log(g / sum(gaps)) for g in gaps if g)
    scores = {"priority": span * deviation, "min_max": span, "variation": deviation, "entropy": 1 / (1 + entropy)}
    return float(scores[metric])


@in_turn(metric=METRICS, dtype=DTYPES)
def test_head_scores_are_their_formulas(metric: str, dtype: torch.dtype, device: torch.device) -> None:
    k, v = tokens(2, 3, 20, 16, dtype=dtype, device=device), tokens(2, 3, 20, 16, dtype=dtype, device=device)
    got = head_scores(k, v, metric)
    assert got.dtype == torch.float32
    assert got.shape == (2, 3)
    for row in range(2):
        for head in range(3):
            want = slow_score(k[row, head].tolist(), metric) * slow_score(v[row, head].tolist(), metric)
            # a few float32 roundings in each of the two factors
            budget = 32 * EPS * want
            assert abs(float(got[row, head]) - want) <= budget


@pytest.mark.parametrize("metric", METRICS)
def test_heads_with_uneven_channels_rank_above_even_ones(metric: str, device: torch.device) -> None:
    even = torch.rand(1, 1, 64, 32, device=device)
    uneven = even.clone()
    uneven[..., :3] *= 20
    score = head_scores(torch.cat((uneven, even), 1), torch.cat((uneven, even), 1), metric)
    assert float(score[0, 0]) > float(score[0, 1])


@pytest.mark.parametrize("metric", METRICS)
def test_heads_without_range_rank_lowest(metric: str, device: torch.device) -> None:
    constant = torch.ones(1, 1, 64, 32, device=device)
    x = torch.cat((constant, tokens(1, 3, 64, 32, device=device)), 1)
    score = head_scores(x, x, metric)
    assert bool(score.isfinite().all())
    assert int(score.argmin()) == 0


@pytest.mark.parametrize("metric", METRICS)
def test_units_do_not_change_the_ranking(metric: str, device: torch.device) -> None:
    k, v = tokens(1, 8, 64, 32, device=device), tokens(1, 8, 64, 32, device=device)
    assert torch.equal(head_scores(k, v, metric).argsort(-1), head_scores(64 * k, v / 8, metric).argsort(-1))


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("dim", DIMS)
def test_kernel_gives_the_references_tokens(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = tokens(3, 2, 70, dim, dtype=dtype, device=device).transpose(0, 1)
    for scale in (None, torch.rand(2, 3, 70, device=device) / 50):
        for got, want in zip(
            quantize_tokens(x, scale, backend="triton"), quantize_tokens(x, scale, backend="reference"), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_kernel_shows_what_is_not_finite(value: float, device: torch.device) -> None:
    x = tokens(1, 1, 70, 32, device=device)
    x[0, 0, 5, 3] = value
    _, scale = quantize_tokens(x, backend="triton")
    assert (~scale.isfinite()).nonzero().tolist() == [[0, 0, 5]]


@all_pairs(
    dim=[pytest.param(d, id=f"d{d}") for d in (16, 80, 128)],
    block=[pytest.param(b, id=f"b{b}") for b in (32, 64, 128)],
    bits=ALL_BITS,
)
def test_kernel_gives_the_references_pages(dim: int, block: int, bits: int, device: torch.device) -> None:
    check_pages(dim, block, bits, device)


def test_kernel_gives_the_references_pages_of_every_pair(device: torch.device) -> None:
    for pair in permutations(BITS, 2):
        check_pages(80, 32, pair, device)


def check_pages(dim: int, block: int, width: Width, device: torch.device) -> None:
    k, v = (tokens(2, 2, block, dim, device=device) for _ in range(2))
    v[0, 0] = 0
    parts = (*quantize_tokens(k, backend="reference"), *quantize_tokens(v, backend="reference"))
    got, want = (seal_blocks(*parts, width, backend=backend) for backend in ("triton", "reference"))
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.equal(a, b)
