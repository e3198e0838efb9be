"""Heads of 16 bit: a paged cache that rounds nothing, alone and beside narrower heads."""

import math
from typing import Any

import pytest
import torch
from budgets import check_exact
from choices import TWO_MODES, flat_config
from op_calls import decode, prefill
from stores import make_store, store_codes, tokens

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.layout import UNQUANTIZED, KVStore

pytestmark = pytest.mark.usefixtures("poison")

ALL = {"window": 70, "softcap": 5.0, "sinks": True}


def a_store(
    lengths: list[int], groups: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> KVStore:
    heads = sum(n for _, n in groups)
    k, v = (tokens(len(lengths), heads, max(lengths), 64, dtype=dtype, device=device) for _ in range(2))
    order = torch.stack([torch.randperm(heads) for _ in lengths]).to(device)
    return make_store(k, v, lengths, groups=groups, order=order)


# --- ops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.float16), (ALL, torch.bfloat16), ({}, torch.float32), (ALL, torch.float32)]
)
def test_decode_is_plain_attention(
    options: dict[str, Any], dtype: torch.dtype, mode: str, backend: str, device: torch.device
) -> None:
    """In both modes: what is stored as it is is computed so. Lengths with and without open tokens and blocks."""
    store, q = (
        a_store([130, 5, 64], ((UNQUANTIZED, 2),), dtype, device),
        tokens(3, 8, 3, 64, dtype=dtype, device=device),
    )
    if options.get("sinks"):
        options = options | {"sinks": torch.randn(8, device=device)}
    got = decode(q, store, scaling=0.125, mode=mode, backend=backend, **options)
    check_exact(got, q, [row.values() for row in store_codes(store)], scaling=0.125, **options)


SHAPES = [(64, 64, 8), (80, 32, 4), (128, 64, 2), (256, 64, 16), (128, 128, 6), (256, 128, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float16), (ALL, torch.bfloat16)])
def test_a_step_of_any_shape(
    shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    dim, block, heads = shape
    """One token, so that up to four query rows of a KV head are all that a tile has."""
    lengths = [2 * block + 5, 3, block]
    k, v = (tokens(3, 2, max(lengths), dim, dtype=dtype, device=device) for _ in range(2))
    order = torch.tensor([[1, 0]] * 3, device=device)
    store = make_store(k, v, lengths, groups=((UNQUANTIZED, 2),), order=order, block=block)
    q = tokens(3, heads, 1, dim, dtype=dtype, device=device)
    if options.get("sinks"):
        options = options | {"sinks": torch.randn(heads, device=device)}
    got = decode(q, store, scaling=0.125, backend="triton", **options)
    check_exact(got, q, [row.values() for row in store_codes(store)], scaling=0.125, **options)


def test_small_shares_beside_a_dominant_token_are_kept(backend: str, device: torch.device) -> None:
    """A sink 2^26 times as heavy as others, of value 0: what is left are they, less than float16 tells from 0."""
    k = torch.zeros(1, 1, 512, 64, dtype=torch.float16, device=device)
    k[:, :, 0, 0] = 18.0
    v = torch.full_like(k, 2000.0)
    v[:, :, 0] = 0
    store = make_store(k, v, [512], groups=((UNQUANTIZED, 1),))
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=device)
    q[..., 0] = 1.0
    got = decode(q, store, scaling=1.0, mode="native", backend=backend).out.double()
    want = 2000 * 511 / (511 + math.exp(18))
    assert float((got / want - 1).abs().max()) < 0.01


@pytest.mark.parametrize("size", [1000, 1500, 2000, 4000, 8000])
def test_huge_scores_stay_in_float16(size: int, backend: str, device: torch.device) -> None:
    """Beyond 2^24 float32 does not tell whole numbers apart; what is added to a score in base 2 is then rounded."""
    k = torch.rand(1, 1, 100, 64, device=device).mul(0.5).add(0.75).mul(size).half()
    v = tokens(1, 1, 100, 64, dtype=torch.float16, device=device)
    q = torch.rand(1, 4, 1, 64, device=device).mul(0.5).add(0.75).mul(size).half()
    store = make_store(k, v, [100], groups=((UNQUANTIZED, 1),))
    got = decode(q, store, scaling=0.125, mode="native", backend=backend)
    # float32 leaves open which of the nearest scores is the largest, but not that P is at most 1
    assert float(got.out.abs().max()) <= float(v.abs().max())
    assert got.lse.isfinite().all()


def test_a_prompt_over_a_past(backend: str, device: torch.device) -> None:
    store = a_store([130, 7], ((UNQUANTIZED, 2),), torch.float32, device)
    q, k, v = (tokens(2, heads, 40, 64, device=device) for heads in (4, 2, 2))
    got = prefill(q, k, v, scaling=0.125, past=store, mode="native", backend=backend)
    rows = []
    for row, codes in enumerate(store_codes(store)):
        past_k, past_v = codes.values()
        rows.append((torch.cat((past_k, k[row].double().cpu()), 1), torch.cat((past_v, v[row].double().cpu()), 1)))
    check_exact(got, q, rows, scaling=0.125)


# --- layer ----------------------------------------------------------------------------------------------------------


def test_a_layer_holds_what_it_was_given(backend: Any) -> None:
    """A prompt, steps, a roll-back into a sealed block, and steps again."""
    layer = TurboLayer(flat_config(bits=16, backend=backend), head_order=[1, 0])
    k, v = (tokens(2, 2, 140, 16, dtype=torch.float16) for _ in range(2))

    def feed(start: int, end: int) -> None:
        layer.append(k[:, :, start:end], v[:, :, start:end], NewColumns(end - start))
        layer.commit()

    feed(0, 120)
    for at in range(120, 136):
        feed(at, at + 1)
    layer.crop(-12)
    for at in range(124, 140):
        feed(at, at + 1)
    assert all(map(torch.equal, layer.dequantized(140), (k, v)))


@pytest.mark.parametrize("tokens_at_once", [1, 40])
def test_nan_and_what_float16_cannot_hold_are_refused(tokens_at_once: int, backend: Any) -> None:
    layer = TurboLayer(flat_config(bits=16, backend=backend))
    x = torch.randn(1, 2, 63, 16)
    layer.append(x, x, NewColumns(63))
    layer.commit()
    bad = torch.full((1, 2, tokens_at_once, 16), 1e5)

    def store() -> None:
        layer.append(bad, bad, NewColumns(tokens_at_once))
        layer.commit()

    with pytest.raises(ValueError, match="keys or values hold NaN or Inf"):
        store()
