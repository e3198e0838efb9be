"""SAS, the softmax exponential by table and cubic: its error, and what its threshold drops."""

import math

import pytest
import torch
from budgets import SLACK, check, largest
from choices import TWO_MODES
from op_calls import decode, prefill, quantize_operands
from oracle import Codes
from prefill_support import chunk_codes, int8_queries, step_queries
from sas_support import CUBIC, EPS, check_sas
from stores import make_store, store_codes, tokens

from turbo_hf.ops.reference_flash import sas_exp

pytestmark = pytest.mark.usefixtures("poison")

DROPS = [(-4.0, "native"), (-6.0, "turbo"), (-9.0, "native"), (-20.0, "turbo")]


def test_is_the_published_formula() -> None:
    x = -torch.rand(1000, dtype=torch.float64) * 10
    got = sas_exp(x, -8.0)
    a, b, c, d = CUBIC
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        i = math.floor(-value)
        f = -value - i
        want = 0.0 if value < -8 else math.exp(-i) * (a * f**3 + b * f**2 + c * f + d)
        assert math.isclose(result, want, rel_tol=8 * torch.finfo(torch.float64).eps, abs_tol=0)


@pytest.mark.parametrize("threshold", [-1.0, -2.5, -6.0, -12.0])
def test_is_0_below_its_threshold_and_not_at_it(threshold: float, device: torch.device) -> None:
    at = torch.tensor([threshold, 0.0], device=device)
    below = torch.nextafter(at[:1], torch.tensor(-torch.inf, device=device))
    assert bool((sas_exp(at, threshold) > 0).all())
    gone = torch.cat((below, torch.tensor([threshold - 1, -1e4, -3e38, -torch.inf], device=device)))
    assert not sas_exp(gone, threshold).any()


@pytest.mark.parametrize(("threshold", "mode"), DROPS)
def test_decode_drops_no_more_than_the_threshold_says(threshold: float, mode: str, device: torch.device) -> None:
    k, v = (tokens(2, 2, 200, 64, device=device) for _ in range(2))
    store, q = make_store(k, v, [200, 70]), tokens(2, 4, 3, 64, device=device)
    got = decode(q, store, scaling=0.05, mode=mode, sas_threshold=threshold)
    fake = step_queries(q, [0] * len(q)) if mode == "turbo" else q
    check_sas(got, fake, store_codes(store), threshold, rounds_p=mode == "turbo", scaling=0.05)


@pytest.mark.parametrize(("threshold", "mode"), DROPS)
def test_prefill_drops_no_more_than_the_threshold_says(threshold: float, mode: str, device: torch.device) -> None:
    q, k, v = tokens(1, 4, 130, 64, device=device), *(tokens(1, 2, 130, 64, device=device) for _ in range(2))
    got = prefill(q, k, v, scaling=0.05, mode=mode, sas_threshold=threshold)
    if mode == "native":
        one = torch.ones(2, 130, dtype=torch.float64)
        row = Codes(k[0].double().cpu(), one, v[0].double().cpu(), one, torch.arange(130) // 128)
        check_sas(got, q, [row], threshold, rounds_p=False, scaling=0.05)
        return
    parts = quantize_operands(k, v, mode=mode, backend="reference")
    row = chunk_codes(parts, v[0], 0, 130, 128)
    check_sas(got, int8_queries(q, [0]), [row], threshold, rounds_p=True, scaling=0.05)


def peaked(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v where one key in the middle, at place 70 of 200, scores 8 and all others score 0. Its scale is exact."""
    q = torch.zeros(1, 1, 1, 16, device=device)
    q[..., 0] = 8 * 128 / 127
    k = torch.zeros(1, 1, 200, 16, device=device)
    k[0, 0, 70, 0] = 127 / 128
    return q, k, torch.randn(1, 1, 200, 16, device=device)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_peak_above_the_threshold_drops_the_rest(mode: str, device: torch.device) -> None:
    """At least its own block's other keys; those of a block that is computed before the peak is known may stay."""
    q, k, v = peaked(device)
    store = make_store(k, v, [200], groups=((8, 1),))
    got = decode(q, store, scaling=1.0, mode=mode, sas_threshold=-6.0)
    others = 136 * math.exp(-8)
    peak = 8 + math.log(CUBIC[-1])
    noise = SLACK * 8 * EPS
    assert peak - noise <= float(got.lse) <= peak + math.log1p(others) + noise
    value = store_codes(store)[0].values()[1][:, 70]
    share = others / (1 + others)
    # what P's rounding of others may add is no more than half a step of a block that holds them alone
    check("out", got.out[0, 0], value, (2 * share + share / 127 / 2) * largest(v) + noise * largest(v))
