"""`decode` against the float64 oracle over the very integers that the cache holds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_support import int8_queries
from support import (
    SLACK,
    check,
    check_exact,
    check_turbo,
    largest,
    make_store,
    oracle,
    store_codes,
    tokens,
)

from turbo_hf.layout import BITS, AttentionOutput, KVStore
from turbo_hf.ops import decode as ops
from turbo_hf.ops.prefill import prefill
from turbo_hf.ops.quantize import seal_blocks

pytestmark = pytest.mark.usefixtures("poison")

implementation = "reference"
"""Which backend the test that runs now is about."""


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each implementation; the kernel runs on CUDA, and elsewhere in Triton's interpreter."""
    globals()["implementation"] = request.param
    return str(request.param)


def decode(q: torch.Tensor, store: KVStore, **options: Any) -> AttentionOutput:
    """`ops.decode` by the implementation that the test is about."""
    return ops.decode(q, store, **{"backend": implementation, **options})


Groups = tuple[tuple[int, int], ...]

MODES = [pytest.param(mode, id=mode) for mode in ("fp16", "turbo")]
RAGGED = [130, 1, 64, 63, 65]
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.float16, torch.bfloat16)]
DTYPES += [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.float32, torch.float64)]
OPTIONS = [
    pytest.param({"window": 1}, id="window1"),
    pytest.param({"window": 20}, id="window20"),
    pytest.param({"window": 64}, id="window64"),
    pytest.param({"window": 100}, id="window100"),
    pytest.param({"window": 1000}, id="window1000"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"window": 70, "softcap": 5.0, "sinks": True}, id="all"),
]


def random_store(
    lengths: Sequence[int], heads: int, dim: int, device: torch.device, *, dtype: torch.dtype | None = None, **how: Any
) -> KVStore:
    shape, dtype = (len(lengths), heads, max(lengths), dim), dtype or torch.float32
    k, v = (tokens(*shape, dtype=dtype, device=device) for _ in range(2))
    return make_store(k, v, lengths, **how)


def check_decode(
    q: torch.Tensor, store: KVStore, mode: str, *, starts: Sequence[int] | None = None, **options: Any
) -> AttentionOutput:
    """Assert that `decode` is right in `mode`, and return it. sinks=True stands for random ones."""
    if options.get("sinks") is True:
        options["sinks"] = torch.randn(q.shape[1], device=q.device) * 3
    options.setdefault("scaling", q.shape[-1] ** -0.5)
    first = None if starts is None else torch.tensor(starts, device=q.device)
    got = decode(q, store, starts=first, mode=mode, **options)
    rows = store_codes(store)
    if mode == "fp16":
        check_exact(got, q, [row.values() for row in rows], starts=starts, **options)
    else:
        check_turbo(got, int8_queries(q, starts or [0] * len(q)), q.dtype, rows, starts=starts, **options)
    return got


# --- against the oracle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("query_heads", "kv_heads"),
    [
        pytest.param(2, 2, id="gqa1:1"),
        pytest.param(8, 2, id="gqa4:1"),
        pytest.param(14, 2, id="gqa7:1"),
        pytest.param(4, 1, id="mqa"),
    ],
)
def test_head_groups(query_heads: int, kv_heads: int, mode: str, device: torch.device, backend: str) -> None:
    store = random_store(RAGGED, kv_heads, 64, device)
    check_decode(tokens(5, query_heads, 1, 64, device=device), store, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [pytest.param(bits, id=f"{bits}bit") for bits in BITS])
@pytest.mark.parametrize("dim", [pytest.param(d, id=f"d{d}") for d in (16, 64, 80, 96, 128)])
def test_head_dims_and_bits(dim: int, bits: int, mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 63], 2, dim, device, groups=((bits, 2),))
    check_decode(tokens(2, 4, 2, dim, device=device), store, mode, starts=[0, 1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [pytest.param(n, id=f"n{n}") for n in (1, 63, 64, 65, 127, 128, 130)])
def test_lengths(length: int, mode: str, device: torch.device, backend: str) -> None:
    check_decode(tokens(1, 4, 1, 64, device=device), random_store([length], 1, 64, device), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [pytest.param(m, id=f"m{m}") for m in (1, 2, 5, 16)])
def test_several_tokens(m: int, mode: str, device: torch.device, backend: str) -> None:
    """Drafts: the last m tokens see only what stands before them, across a block's edge too."""
    store = random_store([130, 16, 64, 70], 2, 64, device)
    check_decode(tokens(4, 4, m, 64, device=device), store, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: dict[str, Any], mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 4, 64, 63, 65], 2, 64, device, groups=((4, 1), (2, 1)))
    check_decode(tokens(5, 4, 3, 64, device=device), store, mode, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, mode: str, device: torch.device, backend: str) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("float64 has no kernel")
    store = random_store([130, 65], 2, 64, device, dtype=dtype)
    check_decode(tokens(2, 4, 2, 64, dtype=dtype, device=device), store, mode, sinks=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [pytest.param(b, id=f"b{b}") for b in (32, 64, 128)])
def test_block_sizes_and_open_tokens_beyond_one(block: int, mode: str, device: torch.device, backend: str) -> None:
    store = random_store([300, 140], 2, 64, device, block=block)
    check_decode(tokens(2, 4, 3, 64, device=device), store, mode, window=150)
    # while tokens may still be taken back, whole blocks stay open
    store = random_store([300, 140], 2, 64, device, block=block, sealed=[0, 1])
    check_decode(tokens(2, 4, 3, 64, device=device), store, mode, window=150)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(((4, 4),), id="4"),
        pytest.param(((4, 2), (2, 2)), id="4+2"),
        pytest.param(((8, 1), (3, 3)), id="8+3"),
        pytest.param(((8, 1), (4, 1), (3, 1), (2, 1)), id="8+4+3+2"),
    ],
)
def test_heads_of_any_width_in_any_order(groups: Groups, mode: str, device: torch.device, backend: str) -> None:
    order = torch.stack([torch.randperm(4) for _ in range(3)])
    store = random_store([130, 64, 90], 4, 64, device, groups=groups, order=order)
    check_decode(tokens(3, 8, 2, 64, device=device), store, mode)


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_neither_read_nor_written(mode: str, device: torch.device, backend: str) -> None:
    """Rows that bring fewer tokens than others, one that brings none, one that holds none at all."""
    q, starts = tokens(4, 4, 5, 64, device=device), [0, 3, 5, 5]
    for row, start in enumerate(starts):
        q[row, :, :start] = torch.nan
    got = check_decode(q, random_store([130, 2, 70, 0], 2, 64, device), mode, starts=starts, sinks=True)
    assert bool(got.lse[2:].isneginf().all())
    assert not got.out[2:].any()


@pytest.mark.parametrize("mode", MODES)
def test_strides_of_q_do_not_matter(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 65], 2, 64, device)
    q = tokens(2, 3, 4, 64, device=device).transpose(1, 2)
    got = check_decode(q, store, mode)
    for a, b in zip(got, decode(q.contiguous(), store, scaling=0.125, mode=mode), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [pytest.param(size, id=f"scores{size:g}") for size in (0.0, 1e-6, 1e3, 1e6)])
def test_scores_of_any_size(size: float, mode: str, device: torch.device, backend: str) -> None:
    """One key takes all of P, or all keys the same share, without a NaN and with lse as large as the scores."""
    store = random_store([130, 65], 2, 64, device)
    q = tokens(2, 4, 2, 64, device=device)
    check_decode(size * q, store, mode, scaling=1.0, sinks=torch.zeros(4, device=device))
    check_decode(size * q, store, mode, scaling=1.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_sink_above_all_scores_takes_all(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([70], 2, 64, device)
    got = check_decode(tokens(1, 2, 1, 64, device=device), store, mode, sinks=torch.full((2,), 200.0, device=device))
    assert bool((got.lse == 200).all())
    assert largest(got.out) < torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_zeros(mode: str, device: torch.device, backend: str) -> None:
    """Scales of 0 must not divide anything."""
    k, v = tokens(1, 2, 150, 16, device=device), tokens(1, 2, 150, 16, device=device)
    k[:, :, :64], v[:, :, 64:128], k[:, :, 140:], v[:, :, 130:] = 0, 0, 0, 0
    check_decode(tokens(1, 4, 3, 16, device=device), make_store(k, v, [150]), mode)
    check_decode(torch.zeros(1, 4, 3, 16, device=device), make_store(k, v, [150]), mode)


@settings(max_examples=150)
@given(data=st.data())
def test_any_decode(data: st.DataObject) -> None:
    any_decode(data, "reference", torch.device("cpu"))


@settings(max_examples=30)
@given(data=st.data())
def test_any_decode_by_the_kernel(data: st.DataObject, device: torch.device) -> None:
    any_decode(data, "triton", device)


def any_decode(data: st.DataObject, name: str, device: torch.device) -> None:
    """Any shape, lengths, widths, options: right in both modes."""
    globals()["implementation"] = name
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.integers(1, 4), "group")
    block, dim = data.draw(st.sampled_from((32, 64)), "block"), data.draw(st.sampled_from((16, 32, 48)), "dim")
    m = data.draw(st.integers(1, 16), "m")
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3), "lengths")
    new = [data.draw(st.integers(0, min(m, n)), "new") for n in lengths]
    sealed = [data.draw(st.integers(0, n // block), "sealed") for n in lengths]
    low = data.draw(st.integers(0, kv_heads), "low")
    widths = (data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(BITS)))
    groups = tuple((bits, n) for bits, n in zip(widths, (kv_heads - low, low), strict=True) if n)
    order = torch.tensor([data.draw(st.permutations(range(kv_heads)), "order") for _ in lengths])
    options = {
        "window": data.draw(st.none() | st.integers(1, 160), "window"),
        "softcap": data.draw(st.none() | st.sampled_from((1.0, 30.0)), "softcap"),
        "sinks": data.draw(st.none() | st.just(True), "sinks"),
    }
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    store = random_store(lengths, kv_heads, dim, device, groups=groups, order=order, block=block, sealed=sealed)
    q = tokens(len(lengths), kv_heads * group, m, dim, device=device)
    for mode in ("fp16", "turbo"):
        check_decode(q, store, mode, starts=[m - n for n in new], **options)


# --- what is the same must come out the same ------------------------------------------------------------------------


def same(got: AttentionOutput, want: AttentionOutput, values: float) -> None:
    """Equal but for the order in which float32 sums are taken."""
    eps = torch.finfo(torch.float32).eps
    check("out", got.out, want.out.double().cpu(), SLACK * eps * values)
    check("lse", got.lse, want.lse.double().cpu(), SLACK * eps * (1 + largest(want.lse)))


@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_the_same_alone_and_in_a_batch(mode: str, device: torch.device, backend: str) -> None:
    lengths, starts = [130, 5, 64], [0, 3, 1]
    k, v = tokens(3, 2, 130, 64, device=device), tokens(3, 2, 130, 64, device=device)
    q, order = tokens(3, 4, 4, 64, device=device), torch.tensor([[0, 1], [1, 0], [1, 0]])
    options: dict[str, Any] = {"scaling": 0.125, "window": 100, "mode": mode}
    groups = ((4, 1), (2, 1))
    store = make_store(k, v, lengths, groups=groups, order=order)
    batch = decode(q, store, starts=torch.tensor(starts, device=device), **options)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        one = slice(row, row + 1)
        store = make_store(k[one], v[one], [length], groups=groups, order=order[one])
        alone = decode(q[one, :, start:], store, **options)
        same(AttentionOutput(batch.out[one, :, start:], batch.lse[one, :, start:]), alone, largest(v))


@pytest.mark.parametrize("mode", MODES)
def test_several_tokens_are_the_same_one_by_one(mode: str, device: torch.device, backend: str) -> None:
    k, v = tokens(3, 2, 136, 64, device=device), tokens(3, 2, 136, 64, device=device)
    store, q = make_store(k, v, [136, 90, 72]), tokens(3, 4, 8, 64, device=device)
    together = decode(q, store, scaling=0.125, mode=mode)
    for i in range(8):
        shorter, one = store._replace(open_len=store.open_len - (7 - i)), slice(i, i + 1)
        alone = decode(q[:, :, one], shorter, scaling=0.125, mode=mode)
        same(AttentionOutput(together.out[:, :, one], together.lse[:, :, one]), alone, largest(v))


@pytest.mark.parametrize("mode", MODES)
def test_a_window_longer_than_the_row_is_no_window(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 90], 2, 64, device)
    q = tokens(2, 4, 2, 64, device=device)
    for a, b in zip(
        decode(q, store, scaling=0.125, mode=mode), decode(q, store, scaling=0.125, mode=mode, window=130), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_the_only_token_is_returned(mode: str, device: torch.device, backend: str) -> None:
    """P is 1: out is the value that the cache holds, and lse the score."""
    store = random_store([1], 1, 16, device)
    got = check_decode(tokens(1, 1, 1, 16, device=device), store, mode)
    held = store.v_open[..., 0] * store.v_scale[..., :1]
    check("out", got.out[:, :, 0], held.double().cpu(), torch.finfo(torch.float32).eps * largest(held))


def test_rounding_p_costs_what_its_step_says(device: torch.device, backend: str) -> None:
    """P is rounded, to steps of its tile's maximum / 127: neither exact nor coarser."""
    k, v = torch.randn(2, 2, 512, 64, device=device), torch.randn(2, 2, 512, 64, device=device)
    store, q = make_store(k, v, [512, 512]), torch.randn(2, 4, 4, 64, device=device)
    turbo = decode(q, store, scaling=0.125).out.double().cpu()
    rows = [row.values() for row in store_codes(store)]
    exact = oracle(int8_queries(q, [0, 0]), rows, scaling=0.125)
    steps = []
    for probs, row in zip(exact.probs, store_codes(store), strict=True):
        weight = (probs * row.v_scale.repeat_interleave(2, 0)[:, None]).unflatten(-1, (-1, 64))
        step = weight.amax(-1) / 127
        squares = row.v.square().unflatten(1, (-1, 64)).sum(2).repeat_interleave(2, 0)
        steps.append(torch.einsum("hmb,hbd->hmd", step**2 / 12, squares))
    expected = float(torch.stack(steps).mean().sqrt())
    error = float((turbo - exact.out).square().mean().sqrt())
    assert expected / 2 < error < expected * 2


def test_fewer_bits_cost_more(device: torch.device, backend: str) -> None:
    k, v = tokens(1, 2, 256, 64, device=device), tokens(1, 2, 256, 64, device=device)
    q = tokens(1, 4, 8, 64, device=device)
    want = oracle(q, [(k[0], v[0])], scaling=0.125).out
    for mode in ("fp16", "turbo"):
        errors = []
        for bits in BITS:
            got = decode(q, make_store(k, v, [256], groups=((bits, 2),)), scaling=0.125, mode=mode)
            errors.append(float((got.out.double().cpu() - want).square().mean()))
        assert errors == sorted(errors)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_no_sealed_value_needs_the_clamp(bits: int) -> None:
    """The kernel takes code * step + zero as it is. For each range that a channel can have, it stays in INT8."""
    low, high = (x.flatten() for x in torch.meshgrid(torch.arange(-119, 120), torch.arange(-119, 120), indexing="ij"))
    low, high = low[low <= high], high[low <= high]
    block = torch.where(torch.arange(32)[:, None] % 2 == 0, low, high).to(torch.int8)
    block = torch.nn.functional.pad(block, (0, -len(low) % 16))[None, None]
    pages = seal_blocks(block, torch.ones(1, 1, 32), block, torch.ones(1, 1, 32), bits, "reference")
    step, zero, _, _ = pages.meta[0, 0].long()
    assert int(zero.min()) >= -127
    assert int((zero + step * (2**bits - 1)).max()) <= 127
    assert int(step.max()) * 119 < 2**15 - 128, "a product with a query's code must fit two INT8 digits"


@pytest.mark.parametrize("mode", MODES)
def test_a_query_with_nan_gives_nan(mode: str, device: torch.device, backend: str) -> None:
    store, q = random_store([130, 70], 2, 64, device), tokens(2, 4, 1, 64, device=device)
    q[0, 1, 0, 3] = torch.nan
    got = decode(q, store, scaling=0.125, mode=mode)
    assert bool(got.out[0, 1].isnan().all())
    assert bool(got.out[1].isfinite().all())
    assert bool(got.out[0, 2:].isfinite().all())


def test_float64_is_refused_by_the_kernel_and_served_without_it(device: torch.device) -> None:
    store, q = random_store([70], 2, 64, device), torch.randn(1, 2, 1, 64, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match='backend "triton" cannot run here: float64 has no kernel'):
        ops.decode(q, store, scaling=1.0, backend="triton")
    assert ops.decode(q, store, scaling=1.0).out.dtype == torch.float64


def test_head_dims_above_256_are_refused_by_the_kernel(device: torch.device) -> None:
    store, q = random_store([3], 1, 272, device), torch.randn(1, 1, 1, 272, device=device)
    with pytest.raises(ValueError, match="head dim 272 is above 256"):
        ops.decode(q, store, scaling=1.0, backend="triton")


def test_blocks_that_do_not_fit_in_float32_are_refused_by_the_kernel(device: torch.device) -> None:
    store, q = random_store([3], 1, 128, device, block=128), torch.randn(1, 1, 1, 128, device=device)
    with pytest.raises(ValueError, match="blocks of 128 tokens of 128 channels do not fit in float32"):
        ops.decode(q, store, scaling=1.0, mode="fp16", backend="triton")


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> KVStore:
    globals()["implementation"] = "auto"
    return random_store([4], 2, 16, torch.device("cpu"))


@pytest.mark.parametrize(
    "shape",
    [pytest.param((1, 3, 1, 16), id="heads"), pytest.param((1, 2, 1, 32), id="dim")],
)
def test_refuses_queries_of_another_shape(shape: tuple[int, ...], small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q must be \[B, Hq, M, 16\] with Hq a multiple of 2; got \(1, "):
        decode(torch.zeros(shape), small, scaling=1.0)


def test_refuses_another_batch(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q has 2 rows on cpu; the cache holds 1 on cpu"):
        decode(torch.zeros(2, 2, 1, 16), small, scaling=1.0)


def test_refuses_another_device(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q has 1 rows on meta; the cache holds 1 on cpu"):
        decode(torch.zeros(1, 2, 1, 16, device="meta"), small, scaling=1.0)


def test_refuses_integers(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q must be float16, bfloat16, float32 or float64; got torch.int8"):
        decode(torch.zeros(1, 2, 1, 16, dtype=torch.int8), small, scaling=1.0)


def test_refuses_an_unknown_mode(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"mode must be one of turbo, int8, half, fp8, fp16; got 'fast'"):
        decode(torch.zeros(1, 2, 1, 16), small, scaling=1.0, mode="fast")


def test_refuses_starts_of_another_batch(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"starts must be \[B\] = \[1\]; got \(2,\)"):
        decode(torch.zeros(1, 2, 1, 16), small, scaling=1.0, starts=torch.zeros(2, dtype=torch.int64))


def test_refuses_sinks_of_other_heads(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"sinks must be \[Hq\] = \[4\]; got \(2,\)"):
        decode(torch.zeros(1, 4, 1, 16), small, scaling=1.0, sinks=torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1 token"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"sas_threshold": 1.0}, "sas_threshold must be below 0"),
    ],
    ids=["window", "softcap", "sas"],
)
def test_options_that_leave_nothing_to_attend_to(options: dict[str, Any], message: str) -> None:
    globals()["implementation"] = "auto"
    q = torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match=message):
        prefill(q, q, q, scaling=1.0, **options)
    store = make_store(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), [3])
    with pytest.raises(ValueError, match=message):
        decode(q, store, scaling=1.0, **options)


def test_a_row_shorter_than_the_queries_has_no_token_in_the_first_columns(backend: str) -> None:
    store = make_store(torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16), [2, 5])
    q, sinks = torch.randn(2, 2, 4, 16), torch.zeros(2)
    expected = decode(q, store, scaling=0.25, sinks=sinks, starts=torch.tensor([2, 0]))
    found = decode(q, store, scaling=0.25, sinks=sinks)
    assert torch.equal(found.lse, expected.lse)
    assert torch.equal(found.out, expected.out)
    assert found.lse[0, :, :2].eq(-torch.inf).all()


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sms", [1, 3, 132])
def test_a_plan_for_any_gpu_gives_the_same(sms: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made for another GPU covers every tile once, and so differs in the order of float32 sums alone."""
    pytest.importorskip("triton")
    from turbo_hf.ops import gpu, launch_decode  # noqa: PLC0415 - needs Triton

    globals()["implementation"] = "triton"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    k, v = tokens(2, 2, 400, 64, device=device), tokens(2, 2, 400, 64, device=device)
    store, q = make_store(k, v, [400, 90], groups=((4, 1), (2, 1)), block=32), tokens(2, 4, 1, 64, device=device)
    own = decode(q, store, scaling=0.125, mode=mode)
    launch_decode._workspace.cache_clear()
    monkeypatch.setattr(gpu, "sms", lambda device: sms)
    same(decode(q, store, scaling=0.125, mode=mode), own, largest(v))
    launch_decode._workspace.cache_clear()


def test_launches_that_are_replayed_keep_their_workspace() -> None:
    pytest.importorskip("triton")
    from turbo_hf.ops import launch_decode  # noqa: PLC0415 - needs Triton

    globals()["implementation"] = "triton"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    k, v = tokens(2, 1, 400, 64, device=device), tokens(2, 1, 400, 64, device=device)
    plans: dict[Any, Any] = {}
    store, q = make_store(k, v, [400, 90], block=32)._replace(plans=plans), tokens(2, 4, 1, 64, device=device)
    want = decode(q, store, scaling=0.125)
    (made,) = plans.values()
    # others have come between, and theirs is the one that is remembered
    launch_decode._workspace.cache_clear()
    got = decode(q, store, scaling=0.125)
    assert torch.equal(got.out, want.out)
    assert list(plans.values()) == [made]
    assert launch_decode._workspace.cache_info().currsize == 0


@pytest.mark.parametrize("plan", ["whole", "split"])
def test_plans_of_other_papers_give_the_same(plan: str) -> None:
    pytest.importorskip("triton")
    from turbo_hf.ops import launch_decode  # noqa: PLC0415 - needs Triton

    globals()["implementation"] = "triton"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    k, v = tokens(2, 1, 400, 64, device=device), tokens(2, 1, 400, 64, device=device)
    store, q = make_store(k, v, [400, 90], block=32), tokens(2, 4, 1, 64, device=device)
    expected = decode(q, store, scaling=0.125)
    replayed: dict[Any, Any] = {}
    for at in (store, store._replace(plans=replayed)):
        same(launch_decode.decode(q, at, scaling=0.125, plan=plan), expected, largest(v))


def test_a_cache_without_a_token(backend: str) -> None:
    store = make_store(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16), [0, 0])
    got = decode(torch.randn(2, 4, 1, 16), store, scaling=0.25, sinks=torch.zeros(4))
    assert not got.out.any()
    assert bool(got.lse.isneginf().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sealed_host": (2,)}, r"store.sealed_host must hold the numbers in store.sealed, \(1,\); got \(2,\)"),
        ({"sealed_host": (1, 1)}, r"store.sealed_host must hold the numbers in store.sealed, \(1,\); got \(1, 1\)"),
        (
            {"sealed": torch.tensor([3])},
            r"store.sealed must give 1 rows of 0 to 1 blocks, as the table has; got \(3,\)",
        ),
        ({"sealed": torch.tensor([-1])}, r"store.sealed must give 1 rows of 0 to 1 blocks"),
        ({"sealed": torch.tensor([1, 1])}, r"store.sealed must be \[B\] = \[1\]; got \(2,\)"),
        ({"open_len": torch.tensor([1, 1])}, r"store.open_len must be \[B\] = \[1\]; got \(2,\)"),
        (
            {"table": torch.zeros(2, 1, dtype=torch.int64)},
            r"store.table must be \[B, blocks\] with B = 1; got \(2, 1\)",
        ),
    ],
    ids=["host", "host-rows", "more", "negative", "rows", "open-rows", "table"],
)
def test_refuses_lengths_that_are_not_the_caches(change: dict[str, Any], message: str) -> None:
    globals()["implementation"] = "auto"
    store = random_store([70], 2, 16, torch.device("cpu"))._replace(**change)
    with pytest.raises(ValueError, match=message):
        decode(torch.zeros(1, 2, 1, 16), store, scaling=1.0)
