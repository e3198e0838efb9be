"""Both stages of quantization, their contract and kernels; heads ranked; a cache read back; where the bits lie."""

import math
from itertools import permutations, product

import pytest
import torch
from choices import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from op_calls import quantize_tokens, seal_blocks
from stores import CODE_MAX, make_store, store_codes, tokens, unpack

from turbo_hf import layout
from turbo_hf.calibration.heads import head_scores
from turbo_hf.config.expected import FLOATS
from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.ops.store.quantize import dequantize
from turbo_hf.ops.store.reference import reference_unpack_blocks

pytestmark = pytest.mark.usefixtures("poison")

ALL_BITS = [pytest.param(bits, id=f"{bits}bit") for bits in layout.BITS]
STAGE_2 = [pytest.param(bits, id=f"{bits}bit") for bits in layout.BITS if bits != 8]
DIMS = [pytest.param(d, id=f"d{d}") for d in (16, 64, 80, 96, 128)]
EPS = torch.finfo(torch.float32).eps


# --- stage 1 --------------------------------------------------------------------------------------------------------


def assert_stage_1(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """INT8 of x [B, H, M, D], one scale per token: smallest scales of bfloat16, nearest codes, half a step lost."""
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert codes.shape == x.shape
    assert scale.shape == x.shape[:3]
    codes, step, x = codes.double(), scale.double()[..., None], x.double()
    want = x.abs().amax(-1) / CODE_MAX
    # one division in float32, rounded up to what bfloat16 holds
    assert torch.equal(scale.bfloat16().float(), scale)
    assert bool((step[..., 0] >= want * (1 - EPS)).all())
    assert bool((step[..., 0] <= want * (1 + 2.0**-7) * (1 + EPS)).all())
    assert float(codes.abs().max()) <= CODE_MAX
    # away from ties, where the float32 quotient may round the other way
    ratio = x / step.clamp(min=torch.finfo(torch.float32).tiny)
    clear = (ratio - ratio.floor() - 0.5).abs() > 2**-10
    assert torch.equal(codes[clear], ratio.round()[clear])
    # the quotient's rounding, and that of a float64 input on its way to float32
    assert bool(((codes * step - x).abs() <= step / 2 + 2 * EPS * x.abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 80])
def test_tokens_are_off_by_half_a_step(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = tokens(2, 3, 65, dim, dtype=dtype, device=device)
    codes, scale = quantize_tokens(x)
    assert_stage_1(x, codes, scale)
    # as far as the scale is rounded up
    assert bool((codes.long().abs().amax(-1) >= CODE_MAX / (1 + 2.0**-7) - 0.5).all())


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


# --- pages ----------------------------------------------------------------------------------------------------------


def channels_of(shape: tuple[int, ...]) -> torch.Tensor:
    """int8 [P, S, b, D] whose channels have all kinds of ranges."""
    low, high = (torch.randint(-CODE_MAX, CODE_MAX + 1, (*shape[:2], 1, shape[3])) for _ in range(2))
    return (low + torch.rand(shape) * (high - low)).round().to(torch.int8)


def coded_sizes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What INT8 tokens [..., b, D] with scales [..., b] are divided by: their root mean squares in one unit, by which
    the largest number is 126, rounded up to bfloat16. float64 [..., b], by the roundings of float32."""
    root = (codes.double().square().sum(-1).float() * (1 / codes.shape[-1])).double().sqrt().float()
    most = codes.abs().amax(-1).float() / root.clamp(min=1)
    unit = (most.amax(-1, keepdim=True).double() / 126).float()
    exact = scale * (root * unit)
    near = exact.bfloat16()
    return torch.where(near.float() < exact, (near.view(torch.int16) + 1).view(torch.bfloat16), near).double()


def assert_sizes(was: torch.Tensor, got: torch.Tensor, size: torch.Tensor) -> None:
    """Tokens was, got [..., b, D], got in units of sizes [..., b]: by these, tokens are as long as before in their own
    direction, as nearly as bfloat16 can say."""
    own, now = was.square().sum(-1), (was * got).sum(-1) * size
    assert bool(((now - own).abs() <= (2.0**-8 + 16 * EPS) * own).all())


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("bits", STAGE_2)
def test_a_page_is_its_formula(bits: int, block: int, device: torch.device) -> None:
    k, v = (channels_of((2, 2, block, 16)) for _ in range(2))
    scale = torch.rand(2, 2, block).bfloat16().float()
    pages = seal_blocks(k.to(device), scale.to(device), v.to(device), scale.to(device), bits)
    assert pages.bits == bits
    time_order = [layout.VALUE_ORDER.index(t % 16) + t // 16 * 16 for t in range(block)]
    levels = 2**bits - 1
    for page, slot in product(range(2), repeat=2):
        codes = [unpack(pages.k[page, slot], bits), unpack(pages.v[page, slot], bits)[:, time_order].T]
        lines = pages.meta[page, slot].cpu().double()
        for i in range(2):
            token, own = (k, v)[i][page, slot].double(), scale[page, slot].double()
            x = token * (own / coded_sizes((k, v)[i][page, slot], scale[page, slot]))[:, None]
            zero, span = lines[2 * i], lines[2 * i + 1] % 256
            got = zero + codes[i].double() * span / levels
            assert_sizes(token * own[:, None], got, pages.size[page, slot, i].cpu().double())
            # quotients are rounded to float32, by which they may be below or above an integer
            near = 256 * 4 * EPS
            inset = (x.amax(0) - x.amin(0)) * layout.INSET[bits]
            low, high = x.amin(0) + inset, x.amax(0) - inset
            assert bool(((low - near).floor() <= zero).all() & (zero <= (low + near).floor()).all())
            assert bool(((high - near).ceil() <= zero + span).all() & (zero + span <= (high + near).ceil()).all())
            want = ((x - zero) * levels / span.clamp(min=1)).clamp(0, levels)
            clear = (want - want.floor() - 0.5).abs() > levels * near
            assert torch.equal(codes[i][clear].double(), want.round()[clear])


@pytest.mark.parametrize("bits", STAGE_2)
def test_zeros_and_spans_fit_their_bytes(bits: int, device: torch.device) -> None:
    """So that what a code stands for is from -127 to 127, and back in the token's own size nothing has left its range:
    of tokens with a single number, of equal numbers, of nothing, and of any sizes."""
    x = tokens(8, 1, 64, 80, device=device) * 10.0 ** torch.randint(-9, 9, (8, 1, 64, 1), device=device)
    x[1, 0] = 0
    x[1, 0, torch.arange(64), torch.arange(64)] = torch.linspace(-9, 9, 64, device=device)
    x[2] = x[2].sign()
    x[3] = 1
    x[4, 0, 7:] = 0
    x[5] = 0
    codes, scale = quantize_tokens(x)
    pages = seal_blocks(codes, scale, -codes, scale, bits)
    zero, span = pages.meta[:, :, ::2].long(), pages.meta[:, :, 1::2].long() % 256
    assert int(zero.min()) >= -127
    assert int((zero + span).max()) <= 127
    assert int(span.max()) > 127, "no span needs its eighth bit: the test shows nothing"
    for i, back in enumerate(reference_unpack_blocks(pages)):
        assert bool(pages.size[:, :, i].isfinite().all())
        assert not (back * pages.size[:, :, i].float()[..., None])[x.abs().amax(-1) == 0].any()


@pytest.mark.parametrize("dim", [16, 80, 128, 512])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_sealing_tokens_costs_half_a_step_of_their_channels(dim: int, bits: int, device: torch.device) -> None:
    x = tokens(3, 2, 64, dim, device=device)
    x[0, 0, 9] *= 1000  # one token takes nothing from its block
    x[1] = 0
    k, k_scale = quantize_tokens(x)
    v, v_scale = quantize_tokens(7 * x.flip(-1))
    pages = seal_blocks(k, k_scale, v, v_scale, bits)
    for i, (want, scale) in enumerate(((x, k_scale), (7 * x.flip(-1), v_scale))):
        codes, got, bound = (k, v)[i], reference_unpack_blocks(pages)[i].double(), scale.double()[..., None] / 2
        size = pages.size[:, :, i].double()
        if bits != 8:
            assert_sizes((codes * scale[..., None]).double(), got, size)
            # the stored size is one by which the token is as long as before, which is not the nearest to its numbers
            size = coded_sizes(codes.cpu(), scale.cpu()).to(device)
            span = (pages.meta[:, :, 2 * i + 1].double() % 256)[:, :, None]
            bound = bound + size[..., None] * (span / (2 * (2**bits - 1)) + 256 * 4 * EPS)
        assert bool(((got * size[..., None] - want.double()).abs() <= bound + 4 * EPS * want.double().abs()).all())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_sealing_takes_any_strides(bits: int, device: torch.device) -> None:
    k = channels_of((2, 64, 3, 32)).transpose(1, 2).to(device)
    v = channels_of((3, 2, 64, 32)).transpose(0, 1).to(device)
    scale = torch.rand(2, 64, 3, device=device).transpose(1, 2)
    got = seal_blocks(k, scale, v, scale, bits)
    want = seal_blocks(k.contiguous(), scale.contiguous(), v.contiguous(), scale.contiguous(), bits)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.equal(a, b)
    strided = layout.PagedHeads(bits, *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in got[1:]))
    for a, b in zip(reference_unpack_blocks(strided), reference_unpack_blocks(got), strict=True):
        assert torch.equal(a, b)


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


@pytest.mark.parametrize(("metric", "dtype"), [*zip(HEAD_METRICS, FLOATS, strict=True)])
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


@pytest.mark.parametrize("metric", HEAD_METRICS)
def test_heads_without_range_rank_lowest(metric: str, device: torch.device) -> None:
    constant = torch.ones(1, 1, 64, 32, device=device)
    x = torch.cat((constant, tokens(1, 3, 64, 32, device=device)), 1)
    score = head_scores(x, x, metric)
    assert bool(score.isfinite().all())
    assert int(score.argmin()) == 0


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("dim", DIMS)
def test_kernel_gives_the_references_tokens(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = tokens(3, 2, 70, dim, dtype=dtype, device=device).transpose(0, 1)
    for got, want in zip(quantize_tokens(x, backend="triton"), quantize_tokens(x, backend="reference"), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_kernel_shows_what_is_not_finite(value: float, device: torch.device) -> None:
    x = tokens(1, 1, 70, 32, device=device)
    x[0, 0, 5, 3] = value
    _, scale = quantize_tokens(x, backend="triton")
    assert (~scale.isfinite()).nonzero().tolist() == [[0, 0, 5]]


@pytest.mark.parametrize(
    ("dim", "block", "width"),
    [
        *((*size, bits) for size in ((16, 128), (80, 32), (80, 64), (128, 64), (128, 128)) for bits in layout.BITS),
        *((80, 32, pair) for pair in permutations(layout.BITS, 2)),
    ],
)
def test_kernel_gives_the_references_pages(dim: int, block: int, width: layout.Width, device: torch.device) -> None:
    k, v = (tokens(2, 2, block, dim, device=device) for _ in range(2))
    v[0, 0] = 0
    parts = (*quantize_tokens(k, backend="reference"), *quantize_tokens(v, backend="reference"))
    got, want = (seal_blocks(*parts, width, backend=backend) for backend in ("triton", "reference"))
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.equal(a, b)


# --- a cache read back ----------------------------------------------------------------------------------------------


def assert_dequantized(store: layout.KVStore, dtype: torch.dtype) -> None:
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


def test_tables_may_be_wider_than_any_row(device: torch.device) -> None:
    """Page 0 stands where a row has no block; it may hold anything."""
    k, v = tokens(2, 2, 130, 16, device=device), tokens(2, 2, 130, 16, device=device)
    store = make_store(k, v, [130, 70])
    assert_dequantized(store._replace(table=torch.nn.functional.pad(store.table, (0, 2))), torch.float32)


@pytest.mark.parametrize("bits", STAGE_2)
def test_values_at_the_end_of_the_range_stay_finite(bits: int, device: torch.device) -> None:
    """A rounded step reaches beyond the largest code; what it stands for must not become an infinity."""
    for dtype in FLOATS:
        top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        x = torch.full((1, 1, 64, 16), top, dtype=dtype, device=device)
        x[:, :, ::2] *= -1
        for y in dequantize(make_store(x, -x, [64], groups=((bits, 1),)), dtype):
            assert bool(y.isfinite().all())


@given(data=st.data())
def test_any_cache_reads_back(data: st.DataObject) -> None:
    heads, block = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((32, 64, 128)))
    lengths = data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=3))
    cut = data.draw(st.integers(0, heads))
    every: list[layout.Width] = [*layout.BITS, *permutations(layout.BITS, 2)]
    widths = data.draw(st.lists(st.sampled_from(every), min_size=2, max_size=2))
    # while tokens may still be taken back, whole blocks stay open
    sealed = [data.draw(st.integers(0, n // block)) for n in lengths] if data.draw(st.booleans()) else None
    groups = tuple((bits, n) for bits, n in zip(widths, (cut, heads - cut), strict=True) if n)
    order = torch.tensor([data.draw(st.permutations(range(heads))) for _ in lengths])
    torch.manual_seed(data.draw(st.integers(0, 99)))
    k, v = (tokens(len(lengths), heads, 140, 16) for _ in range(2))
    assert_dequantized(make_store(k, v, lengths, groups=groups, order=order, block=block, sealed=sealed), torch.float32)


# --- where the bits lie ----------------------------------------------------------------------------------------------


@given(bits=st.sampled_from((4, 3, 2)), n=st.integers(1, 24).map(lambda i: 16 * i), data=st.data())
def test_packing_of_any_codes(bits: int, n: int, data: st.DataObject) -> None:
    line = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=n, max_size=n)), dtype=torch.uint8)
    codes = torch.stack([line.roll(i) for i in range(16)])
    packed = layout.half_split(codes, bits)
    assert torch.equal(layout.half_merge(packed, bits), codes)
    # the tests' own reader, on which the oracle of compressed attention stands
    assert unpack(packed, bits).tolist() == codes.tolist()


@pytest.mark.parametrize("block", [pytest.param(b, id=f"b{b}") for b in layout.BLOCK_SIZES])
def test_value_order_is_a_permutation_within_16_tokens(block: int, device: torch.device) -> None:
    order = layout.value_order(block, device)
    assert order.device.type == device.type
    groups = order.reshape(-1, 16)
    for i, group in enumerate(groups.tolist()):
        assert sorted(group) == list(range(16 * i, 16 * i + 16))
    # a thread t of four holds tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of 16: they must stand side by side
    for t in range(4):
        assert groups[0, 4 * t : 4 * t + 4].tolist() == [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]


def nbytes(pages: layout.PagedHeads) -> int:
    return sum(x.nbytes for x in (pages.k, pages.v, pages.meta, pages.size))


@pytest.mark.parametrize("bits", [pytest.param(b, id=f"{b}bit") for b in layout.BITS])
def test_page_bytes_are_those_allocated(bits: int, device: torch.device) -> None:
    for dim, block, value_bits in product((16, 64, 80, 128), layout.BLOCK_SIZES, layout.BITS):
        pages = layout.empty_pages((bits, value_bits), 3, 2, dim, block, device)
        assert nbytes(pages) == 6 * layout.page_bytes(dim, (bits, value_bits), block)
        assert (pages.bits, pages.value_bits) == (bits, value_bits)
        assert pages.width == (bits if bits == value_bits else (bits, value_bits))
        assert pages.k.shape[:3] == (3, 2, block)
        assert pages.v.shape[:3] == (3, 2, dim)


@pytest.mark.parametrize(
    ("dim", "by"), [pytest.param(64, (3.56, 6.4), id="d64"), pytest.param(128, (3.66, 6.7), id="d128")]
)
def test_compression_is_what_the_algorithm_promises(dim: int, by: tuple[float, float]) -> None:
    half_precision = 2 * 2 * 64 * dim
    assert round(half_precision / layout.page_bytes(dim, 4), 2) == by[0]
    assert round(half_precision / layout.page_bytes(dim, 2), 1) == by[1]
    # half of the bits of values: as much as half of the heads at 2 bit
    assert 2 * layout.page_bytes(dim, (4, 2)) == layout.page_bytes(dim, 4) + layout.page_bytes(dim, 2)
    assert layout.page_bytes(128, (4, 2)) / 64 == 108
