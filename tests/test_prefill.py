"""`prefill` of a prompt against the float64 oracle: lengths, heads, types, options, padding, numbers of any size."""

from typing import Any

import pytest
import torch
from all_pairs import in_modes
from choices import DTYPES, LENGTHS, MODES, PROMPT_OPTIONS
from op_calls import prefill
from prefill_support import check_prefill, inputs, random_past

from turbo_hf.layout import SCORE_LIMIT

pytestmark = pytest.mark.usefixtures("poison")


@in_modes(length=LENGTHS)
def test_lengths(length: int, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, length, device), mode)


@in_modes(
    "turbo",
    heads=[
        pytest.param((2, 2), id="gqa1:1"),
        pytest.param((8, 2), id="gqa4:1"),
        pytest.param((4, 1), id="mqa"),
        pytest.param((14, 2), id="gqa7:1"),
    ],
)
def test_head_groups(heads: tuple[int, int], mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, 65, device, heads=heads[0], kv_heads=heads[1]), mode)


@in_modes("turbo", dim=[pytest.param(d, id=f"d{d}") for d in (16, 64, 80, 96, 128)])
def test_head_dims(dim: int, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(1, 65, device, dim=dim), mode)


@in_modes("turbo", block=[pytest.param(b, id=f"b{b}") for b in (32, 64, 128)])
def test_block_sizes(block: int, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, 150, device), mode, block=block, starts=[0, 100])


@in_modes(dtype=DTYPES[::-1])
def test_dtypes(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    check_prefill(*inputs(1, 70, device, dtype=dtype), mode, sinks=True)


@in_modes(options=PROMPT_OPTIONS)
def test_options(options: dict[str, Any], mode: str, device: torch.device) -> None:
    check_prefill(*inputs(2, 130, device), mode, starts=[0, 60], **options)


@pytest.mark.parametrize("mode", MODES)
def test_scaling_is_the_models(mode: str, device: torch.device) -> None:
    check_prefill(*inputs(1, 65, device), mode, scaling=0.03)


@in_modes(causal=[pytest.param(True, id="causal"), pytest.param(False, id="full")])
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


@in_modes(size=[pytest.param(x, id=f"scores{x:g}") for x in (0.0, 1e-6, 1e2, 3e2, 1e4, 1e6, 1e3)])
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
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-43])
def test_blocks_of_zeros(size: float, mode: str, device: torch.device) -> None:
    """Scales of 0 must not divide anything; numbers of which a scale has no finite reciprocal count as 0."""
    q, k, v = inputs(1, 150, device)
    for part in (k[:, :, :64], v[:, :, 64:128], q[:, :, 128:]):
        part.mul_(size)
    check_prefill(q, k, v, mode, block=64)


@pytest.mark.parametrize("mode", MODES)
def test_one_huge_value(mode: str, device: torch.device) -> None:
    """An outlier costs its own block its precision, as the budget knows, and no other block."""
    q, k, v = inputs(1, 130, device)
    k[0, 0, 70, 3], v[0, 1, 70, 3] = 1e4, -1e4
    check_prefill(q, k, v, mode)
