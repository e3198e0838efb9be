"""`prefill`: what is the same comes out the same, and INT8 as a whole misses no more than its rounding."""

from typing import Any

import pytest
import torch
from budgets import SLACK, check, check_same, largest
from choices import MODES
from op_calls import prefill, quantize_operands
from oracle import oracle
from prefill_support import inputs, int8_queries, random_past
from stores import make_store, tokens

from turbo_hf.layout import AttentionOutput
from turbo_hf.ops import reference_flash as flash

pytestmark = pytest.mark.usefixtures("poison")


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
