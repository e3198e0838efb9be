"""`decode`: what is the same comes out the same, alone or in a batch, at once or one by one; what rounding costs."""

from typing import Any

import pytest
import torch
from budgets import check, check_same, largest
from choices import TWO_MODES
from decode_support import check_decode
from op_calls import decode
from oracle import oracle
from prefill_support import int8_queries
from stores import make_store, random_store, store_codes, tokens

from turbo_hf.layout import BITS, AttentionOutput

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_row_is_the_same_alone_and_in_a_batch(mode: str, device: torch.device, backend: str) -> None:
    lengths, starts = [130, 5, 64], [0, 3, 1]
    k, v = tokens(3, 2, 130, 64, device=device), tokens(3, 2, 130, 64, device=device)
    q, order = tokens(3, 4, 4, 64, device=device), torch.tensor([[0, 1], [1, 0], [1, 0]])
    options: dict[str, Any] = {"scaling": 0.125, "window": 100, "mode": mode}
    groups = ((4, 1), (2, 1))
    store = make_store(k, v, lengths, groups=groups, order=order)
    batch = decode(q, store, starts=torch.tensor(starts, device=device), backend=backend, **options)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        one = slice(row, row + 1)
        store = make_store(k[one], v[one], [length], groups=groups, order=order[one])
        alone = decode(q[one, :, start:], store, backend=backend, **options)
        check_same(AttentionOutput(batch.out[one, :, start:], batch.lse[one, :, start:]), alone, largest(v))


@pytest.mark.parametrize("mode", TWO_MODES)
def test_several_tokens_are_the_same_one_by_one(mode: str, device: torch.device, backend: str) -> None:
    k, v = tokens(3, 2, 136, 64, device=device), tokens(3, 2, 136, 64, device=device)
    store, q = make_store(k, v, [136, 90, 72]), tokens(3, 4, 8, 64, device=device)
    together = decode(q, store, scaling=0.125, mode=mode, backend=backend)
    for i in (0, 3, 7):
        shorter, one = store._replace(open_len=store.open_len - (7 - i)), slice(i, i + 1)
        alone = decode(q[:, :, one], shorter, scaling=0.125, mode=mode, backend=backend)
        check_same(AttentionOutput(together.out[:, :, one], together.lse[:, :, one]), alone, largest(v))


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_window_longer_than_the_row_is_no_window(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 90], 2, 64, device)
    q = tokens(2, 4, 2, 64, device=device)
    for a, b in zip(
        decode(q, store, scaling=0.125, mode=mode, backend=backend),
        decode(q, store, scaling=0.125, mode=mode, window=130, backend=backend),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_the_only_token_is_returned(mode: str, device: torch.device, backend: str) -> None:
    """P is 1: out is the value that the cache holds, and lse the score."""
    store = random_store([1], 1, 16, device)
    got = check_decode(tokens(1, 1, 1, 16, device=device), store, mode, backend)
    held = store.v_open[..., 0] * store.v_scale[..., :1]
    check("out", got.out[:, :, 0], held.double().cpu(), torch.finfo(torch.float32).eps * largest(held))


def test_rounding_p_costs_what_its_step_says(device: torch.device, backend: str) -> None:
    """P is rounded, to steps of its tile's maximum / 127: neither exact nor coarser."""
    k, v = torch.randn(2, 2, 512, 64, device=device), torch.randn(2, 2, 512, 64, device=device)
    store, q = make_store(k, v, [512, 512]), torch.randn(2, 4, 4, 64, device=device)
    turbo = decode(q, store, scaling=0.125, backend=backend).out.double().cpu()
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
            got = decode(q, make_store(k, v, [256], groups=((bits, 2),)), scaling=0.125, mode=mode, backend=backend)
            errors.append(float((got.out.double().cpu() - want).square().mean()))
        assert errors == sorted(errors)


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_widest_ranges_overflow_nothing(bits: int, mode: str, device: torch.device, backend: str) -> None:
    """Spans that need their eighth bit, times the largest codes of queries: all numbers as large as the largest."""
    k, v = (tokens(1, 2, 130, 128, device=device).sign() for _ in range(2))
    store = make_store(k, v, [130], groups=((bits, 2),))
    assert int((store.paged[0].meta[:, :, 1::2].long() % 256).max()) >= 252
    check_decode(tokens(1, 4, 2, 128, device=device).sign(), store, mode, backend)


def test_a_row_shorter_than_the_queries_has_no_token_in_the_first_columns(backend: str) -> None:
    store = make_store(torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16), [2, 5])
    q, sinks = torch.randn(2, 2, 4, 16), torch.zeros(2)
    expected = decode(q, store, scaling=0.25, sinks=sinks, starts=torch.tensor([2, 0]), backend=backend)
    found = decode(q, store, scaling=0.25, sinks=sinks, backend=backend)
    assert torch.equal(found.lse, expected.lse)
    assert torch.equal(found.out, expected.out)
    assert found.lse[0, :, :2].eq(-torch.inf).all()
