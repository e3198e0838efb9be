"""`prefill` of a chunk over a compressed past, against the float64 oracle over what the past holds."""

from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_modes
from choices import DTYPES, LENGTHS, MODES, PROMPT_OPTIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_support import check_prefill, inputs, random_past

from turbo_hf.config.turbo_config import ATTENTION_MODES
from turbo_hf.layout import BITS
from turbo_hf.ops import gpu, tuning

pytestmark = pytest.mark.usefixtures("poison")


@in_modes(length=LENGTHS)
def test_a_past_of_any_length(length: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(1, 20, device)
    check_prefill(q, k, v, mode, past=random_past([length], k))


@in_modes(options=PROMPT_OPTIONS)
def test_a_ragged_past(options: dict[str, Any], mode: str, device: torch.device) -> None:
    """Rows whose pasts and chunks have every kind of length, none among them."""
    q, k, v = inputs(5, 66, device)
    past = random_past([130, 0, 64, 3, 90], k, groups=((4, 1), (2, 1)))
    check_prefill(q, k, v, mode, past=past, starts=[0, 1, 66, 65, 20], **options)


@all_pairs(
    dim=[pytest.param(d, id=f"d{d}") for d in (16, 80, 128)],
    bits=[pytest.param(bits, id=f"{bits}bit") for bits in BITS],
    mode=MODES,
)
def test_a_past_of_any_bits(dim: int, bits: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(2, 17, device, dim=dim)
    check_prefill(q, k, v, mode, past=random_past([70, 64], k, groups=((bits, 2),)))


@pytest.mark.parametrize("mode", MODES)
def test_a_past_of_mixed_bits_in_any_order(mode: str, device: torch.device) -> None:
    q, k, v = inputs(3, 17, device, heads=8, kv_heads=4)
    order = torch.stack([torch.randperm(4) for _ in range(3)])
    past = random_past([130, 64, 90], k, groups=((8, 1), ((4, 2), 1), ((2, 8), 1), (3, 1)), order=order)
    check_prefill(q, k, v, mode, past=past)


@in_modes("turbo", blocks=[pytest.param(b, id=f"{b[0]}-{b[1]}") for b in ((32, 32), (128, 128), (32, 64))])
def test_a_past_of_any_block_size(blocks: tuple[int, int], mode: str, device: torch.device) -> None:
    past_block, block = blocks
    q, k, v = inputs(2, 70, device)
    check_prefill(q, k, v, mode, past=random_past([150, 40], k, block=past_block), block=block)


@pytest.mark.parametrize("mode", MODES)
def test_a_past_that_is_not_sealed_yet(mode: str, device: torch.device) -> None:
    q, k, v = inputs(2, 30, device)
    check_prefill(q, k, v, mode, past=random_past([150, 140], k, sealed=[0, 1]))


@in_modes(dtype=DTYPES[::-1])
def test_dtypes_over_a_past(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    q, k, v = inputs(1, 30, device, dtype=dtype)
    check_prefill(q, k, v, mode, past=random_past([100], k))


@pytest.fixture
def many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pasts are shared among programs, however short they are."""
    monkeypatch.setattr(gpu, "sms", lambda device: 132)
    monkeypatch.setattr(tuning, "LEAST_SHARE", 32)


@in_modes(length=[pytest.param(n, id=f"past{n}") for n in (3, 64, 200, 330)])
@pytest.mark.usefixtures("many_programs")
def test_a_past_shared_among_programs(length: int, mode: str, device: torch.device) -> None:
    q, k, v = inputs(2, 70, device)
    check_prefill(q, k, v, mode, past=random_past([length, 40], k, groups=((4, 1), (2, 1))), starts=[0, 30])


@in_modes(options=PROMPT_OPTIONS)
@pytest.mark.usefixtures("many_programs")
def test_a_shared_past_and_every_option(options: dict[str, Any], mode: str, device: torch.device) -> None:
    q, k, v = inputs(3, 66, device)
    check_prefill(q, k, v, mode, past=random_past([300, 0, 90], k), starts=[0, 66, 20], **options)


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
