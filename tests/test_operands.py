"""`quantize_operands`: its reference against the definition, its kernel against the reference."""

from typing import Any

import pytest
import torch
from gpu_support import NO_FP8, has_fp8
from op_calls import quantize_operands
from stores import tokens

from turbo_hf.layout import MODES, QUANTIZED_MODES, VALUE_ORDER, Operands

pytestmark = pytest.mark.usefixtures("poison")

EPS = torch.finfo(torch.float32).eps


def keys_and_values(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (tokens(2, 2, 150, 48, device=device, dtype=dtype) for _ in range(2))
    return k, v


def in_time_order(x: torch.Tensor) -> torch.Tensor:
    """Stored values [B, H, D, T] as [B, H, T, D] float64, tokens in time order."""
    stored = x.float().double().mT
    out = torch.empty_like(stored)
    for position in range(stored.shape[2]):
        out[:, :, position // 16 * 16 + VALUE_ORDER[position % 16]] = stored[:, :, position]
    return out


def spread(scale: torch.Tensor, padded: int) -> torch.Tensor:
    """A scale a token or a block as one a token [B, H, T, 1], float64."""
    return scale.double().repeat_interleave(padded // scale.shape[2], -1)[..., None]


@pytest.mark.parametrize("mode", QUANTIZED_MODES)
@pytest.mark.parametrize("starts", [None, [0, 90]], ids=["whole", "ragged"])
def test_codes_are_nearest_and_scales_smallest(starts: list[int] | None, mode: str, device: torch.device) -> None:
    k, v = keys_and_values(device)
    given = None if starts is None else torch.tensor(starts, device=device)
    for row, start in enumerate(starts or ()):
        k[row, :, :start], v[row, :, :start] = torch.nan, torch.nan
    parts = quantize_operands(k, v, mode=mode, block=64, starts=given, backend="reference")
    for row, start in enumerate(starts or (0, 0)):
        count = 150 - start
        own_k, own_v = k[row, :, start:].double(), v[row, :, start:].double()
        step = spread(parts.k_scale, 192)[row, :, :count]
        codes = parts.k[row].double()
        # half a step, and what float32 division and multiplication round
        assert bool(((codes[:, :count] * step - own_k).abs() <= step * (0.5 + 128 * EPS)).all())
        assert not codes[:, count:].any()
        assert int(codes.abs().max()) == 127
        if parts.v is None or parts.v_scale is None:
            assert mode == "half"
            continue
        values = in_time_order(parts.v)[row]
        v_step = spread(parts.v_scale, 192)[row, :, :count]
        error = (values[:, :count] * v_step - own_v).abs()
        limit = own_v.abs() / 16 + v_step / 512 if mode == "fp8" else v_step / 2
        assert bool((error <= limit + own_v.abs() * 2 * EPS).all())
        assert not values[:, count:].any()
        assert float(values.abs().max()) == MODES[mode].v_top


@pytest.mark.parametrize("mode", QUANTIZED_MODES)
def test_kernel_gives_the_references_codes(mode: str, device: torch.device) -> None:
    if mode == "fp8" and not has_fp8(device):
        pytest.skip(NO_FP8)
    k, v = keys_and_values(device)
    starts = torch.tensor([0, 37], device=device)
    given: dict[str, Any] = {"mode": mode, "block": 64, "starts": starts}
    want = quantize_operands(k, v, backend="reference", **given)
    got = quantize_operands(k, v, backend="triton", **given)
    assert_same(got, want)


@pytest.mark.parametrize("mode", QUANTIZED_MODES)
def test_numbers_too_small_to_divide_by_count_as_0(mode: str, device: torch.device) -> None:
    if mode == "fp8" and not has_fp8(device):
        pytest.skip(NO_FP8)
    k, v = keys_and_values(device)
    k[:, :, :64], v[:, :, :64], v[..., 3] = k[:, :, :64] * 1e-43, v[:, :, :64] * 1e-37, v[..., 3] * 1e-40
    zeros = k.where(k.abs() > 1e-30, 0.0), v.where(v.abs() > 1e-30, 0.0)
    for backend in ("reference", "triton"):
        given: dict[str, Any] = {"mode": mode, "block": 64, "backend": backend}
        assert_same(quantize_operands(k, v, **given), quantize_operands(*zeros, **given))


def assert_same(got: Operands, want: Operands) -> None:
    """Equal but for codes on the edge between two, which the interpreter rounds twice and a GPU once."""
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is None or b is None:
            continue
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        off = (a.float() - b.float()).abs()
        if name in ("k", "v"):
            moved = float((off > 0).float().mean())
            assert moved <= 1e-3, f"{name}: {moved:.1e} of the codes differ"
            assert bool((off <= 1 + b.float().abs() / 7).all()), name
        else:
            assert bool((off <= 4 * EPS * b.abs().max()).all()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_kernel_reads_any_type_and_strides(dtype: torch.dtype, device: torch.device) -> None:
    k, v = keys_and_values(device, dtype)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    want = quantize_operands(k, v, mode="turbo", backend="reference")
    assert_same(quantize_operands(*turned, mode="turbo", backend="triton"), want)
