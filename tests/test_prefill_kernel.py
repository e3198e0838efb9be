"""The prefill kernels: in the interpreter at toy sizes, on a GPU as they run for users."""

from itertools import product
from typing import Any

import pytest
import torch
from budgets import check, float_budget, largest
from choices import MODES
from gpu_support import NO_FP8, has_fp8
from op_calls import prefill
from prefill_support import Inputs, check_prefill, random_past
from stores import tokens

from turbo_hf.eval.bench.oracle import attend
from turbo_hf.layout import BITS, Width, half_type
from turbo_hf.ops import gpu, tuning

pytestmark = pytest.mark.usefixtures("poison")

NO_BFLOAT16 = "products of bfloat16 need a GPU: the interpreter multiplies them as integers"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window1": {"window": 1},
    "window70": {"window": 70},
    "window20": {"window": 20},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 70, "softcap": 5.0, "sinks": True},
}
# modes differ in how they round and in nothing else
CASES = [*product(("turbo", "native"), OPTIONS), *product(("int8", "half", "fp8"), ["all"])]
NOT_FINITE = [
    *product(("q", "k", "v"), (torch.nan, torch.inf), ("turbo", "native")),
    *product(("k", "v"), (torch.inf,), ("int8", "half", "fp8")),
]


def inputs(
    m: int, device: torch.device, mode: str, *, batch: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 32,
    dtype: torch.dtype | None = None,
) -> Inputs:  # fmt: skip
    """q, k, v, float16 where 16-bit products are multiplied: the interpreter knows no other."""
    dtype = dtype or (torch.float16 if mode == "half" else torch.float32)
    if mode == "fp8" and not has_fp8(device):
        pytest.skip(NO_FP8)
    multiplied = {"native": dtype, "half": half_type(dtype)}.get(mode)
    if multiplied == torch.bfloat16 and device.type == "cpu":
        pytest.skip(NO_BFLOAT16)
    q = tokens(batch, heads, m, dim, device=device, dtype=dtype)
    k, v = (tokens(batch, kv_heads, m, dim, device=device, dtype=dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_options(mode: str, options: str, device: torch.device) -> None:
    q, k, v = inputs(130, device, mode)
    check_prefill(q, k, v, mode, block=64, starts=[0, 60], backend="triton", **OPTIONS[options])


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_over_a_ragged_past(mode: str, options: str, device: torch.device) -> None:
    q, k, v = inputs(40, device, mode, batch=3)
    past = random_past([70, 0, 64], k, groups=((4, 1), (2, 1)))
    check_prefill(q, k, v, mode, past=past, block=32, starts=[0, 39, 3], backend="triton", **OPTIONS[options])


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("mode", ["turbo", "native"])
def test_over_a_past_that_programs_share(
    mode: str, options: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(gpu, "sms", lambda device: 132)
    monkeypatch.setattr(tuning, "LEAST_SHARE", 32)
    q, k, v = inputs(66, device, mode, batch=3)
    past = random_past([300, 0, 90], k, groups=((4, 1), (2, 1)))
    check_prefill(q, k, v, mode, past=past, starts=[0, 66, 20], backend="triton", **OPTIONS[options])


@pytest.mark.parametrize("bits", [pytest.param(bits, id=f"{bits}bit") for bits in (*BITS, (4, 2), (8, 3))])
@pytest.mark.parametrize("block", [pytest.param(b, id=f"b{b}") for b in (32, 64, 128)])
def test_a_past_of_any_bits_and_blocks(block: int, bits: Width, device: torch.device) -> None:
    q, k, v = inputs(20, device, "turbo", batch=1, kv_heads=2)
    past = random_past([block + 40], k, groups=((bits, 2),), block=block, order=torch.tensor([[1, 0]]))
    check_prefill(q, k, v, "turbo", past=past, block=64, backend="triton")


@pytest.mark.parametrize(
    ("mode", "dim"),
    [*product(("turbo", "native"), (16, 64, 80, 96, 128, 256)), *product(("int8", "half", "fp8"), [128])],
)
def test_head_dims(dim: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(70, device, mode, batch=1, heads=2, kv_heads=1, dim=dim)
    check_prefill(q, k, v, mode, backend="triton", past=random_past([40], k))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("heads", "kv_heads"), [pytest.param(2, 2, id="mha"), pytest.param(7, 1, id="gqa7:1")])
def test_head_groups(heads: int, kv_heads: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(33, device, mode, batch=1, heads=heads, kv_heads=kv_heads)
    check_prefill(q, k, v, mode, backend="triton")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["f16", "bf16", "f32"])
def test_dtypes(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    q, k, v = inputs(70, device, mode, batch=1, dim=64, dtype=dtype)
    check_prefill(q, k, v, mode, backend="triton", past=random_past([70], k))


@pytest.mark.parametrize("length", [pytest.param(n, id=f"n{n}") for n in (1, 63, 64, 65, 128, 129)])
def test_lengths(length: int, device: torch.device) -> None:
    check_prefill(*inputs(length, device, "turbo", batch=1), "turbo", backend="triton")


@pytest.mark.parametrize("mode", ["turbo", "fp8"])
@pytest.mark.parametrize("dim", [64, 128], ids=["d64", "d128"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_prompts_in_16_bit(dtype: torch.dtype, dim: int, mode: str, device: torch.device) -> None:
    """What Hopper has a kernel of its own for: lengths around its tiles, any group of heads, strides, NaN."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        # of heads with NaN
        pytest.skip(NO_BFLOAT16)
    hopper = ((1, 2, 2), (127, 7, 1), (129, 4, 2), (300, 2, 1))
    # the one that the interpreter runs has smaller tiles, and tests of its own
    for length, heads, kv_heads in hopper if device.type == "cuda" else ((1, 2, 2), (31, 7, 1), (66, 4, 2)):
        q, k, v = inputs(length, device, mode, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
        got = check_prefill(q, k, v, mode, backend="triton")
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        again = prefill(q, k, v, scaling=dim**-0.5, mode=mode, backend="triton")
        assert torch.equal(got.out, again.out)
        q[0, -1, -1, 0] = torch.nan
        broken = prefill(q, k, v, scaling=dim**-0.5, mode=mode, backend="triton").out.isnan()
        assert broken[0, -1, -1].all()
        assert int(broken.sum()) == dim


@pytest.mark.parametrize(("which", "value", "mode"), NOT_FINITE)
def test_nan_and_inf_reach_the_rows_that_see_them(which: str, value: float, mode: str, device: torch.device) -> None:
    """Heads that meet one are computed exactly; all rows but those that see it are as they are without it."""
    x: dict[str, Any] = dict(zip("qkv", inputs(70, device, mode), strict=True))
    x[which][0, 1, 50, 3] = 0
    options: dict[str, Any] = {"scaling": 0.2, "block": 64, "backend": "triton"}
    own, exact = (prefill(**x, mode=name, **options).out.double() for name in (mode, "native"))
    plain = exact_attention(**x)
    x[which][0, 1, 50, 3] = value
    got = prefill(**x, mode=mode, **options)
    want = exact_attention(**{**x, "v": x["v"].nan_to_num(0, 0, 0)})
    sees = torch.zeros_like(got.lse, dtype=torch.bool)
    if which == "q":
        sees[0, 1, 50] = True
    else:
        sees[0, 2:4, 50:] = True
    broken = sees if which == "v" else ~want.isfinite().all(-1)
    assert bool(((~got.out.isfinite()).any(-1) == broken).all())
    assert bool(broken.any())
    expected = torch.where(sees.any(-1)[..., None, None], exact, own)
    # a key of -inf is one that is not there
    expected = torch.where(sees[..., None], want, expected)
    budget = float_budget(plain, exact, largest(x["v"]), got.out.dtype)
    check("rows that are not broken", got.out[~broken], expected[~broken].cpu(), budget)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64."""
    # not torch's own: on CUDA it adds a mask of -inf, and NaN or Inf + -inf reaches rows that may not see it
    return torch.stack([attend(*row, scaling=0.2, causal=True).out for row in zip(q, k, v, strict=True)])


@pytest.mark.parametrize("mode", ["turbo", "native"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_sas_swallows_no_nan(which: str, mode: str, device: torch.device) -> None:
    q, k, v = inputs(100, device, mode)
    {"q": q, "k": k, "v": v}[which][0, 1, 50, 3] = torch.nan
    got = prefill(q, k, v, scaling=0.2, mode=mode, block=64, sas_threshold=-6.0, backend="triton")
    broken = torch.zeros_like(got.lse, dtype=torch.bool)
    if which == "q":
        broken[0, 1, 50] = True
    else:
        broken[0, 2:4, 50:] = True
    assert bool(((~got.out.isfinite()).any(-1) == broken).all())


@pytest.mark.parametrize("mode", ["turbo", "native"])
def test_sas_is_the_references(mode: str, device: torch.device) -> None:
    q, k, v = inputs(100, device, mode)
    options: dict[str, Any] = {"scaling": 0.2, "mode": mode, "sas_threshold": -6.0, "past": random_past([70, 40], k)}
    got, want = (prefill(q, k, v, backend=b, **options) for b in ("triton", "reference"))
    # a score on the threshold may fall on either side, and a code on the edge between two
    assert float((got.out - want.out).norm() / want.out.norm()) < 2e-3
    assert float((got.lse - want.lse).abs().mean()) < 1e-3
