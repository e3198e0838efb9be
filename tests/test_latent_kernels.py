"""Kernels of latent attention against the reference in plain torch."""

from typing import Any

import pytest
import torch
from budgets import check_exact

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.new_columns import NewColumns
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import AttentionOutput
from turbo_hf.ops.latent.contract import latent_decode
from turbo_hf.ops.store.append import append_step
from turbo_hf.ops.store.quantize import dequantize

RANK, ROTARY = 64, 16


def layer_of(bits: int, backend: Any, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Any:
    """A latent layer that holds random rows of these lengths, left-padded."""
    longest, seeded = max(lengths), torch.Generator().manual_seed(1)
    latent = torch.randn(len(lengths), 1, longest, RANK, generator=seeded).to(device, dtype)
    rotary = torch.randn(len(lengths), 1, longest, ROTARY, generator=seeded).to(device, dtype)
    starts = [longest - n for n in lengths]
    valid = torch.arange(longest, device=device) >= torch.tensor(starts, device=device)[:, None]
    new = NewColumns(longest, valid, starts) if any(starts) else NewColumns(longest)
    layer = TurboLayer(TurboConfig(bits=bits, backend=backend), latent=True)
    layer.append(latent, rotary, new)
    layer.commit()
    return layer


@pytest.mark.parametrize(("bits", "heads", "tokens"), [(16, 3, 1), (8, 16, 2), (4, 3, 5), (4, 40, 1)])
def test_a_step_over_latents_is_that_of_the_reference(device: torch.device, bits: int, heads: int, tokens: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    lengths = [200, 70, 7]
    stored = layer_of(bits, "triton", lengths, device, dtype)
    plain = layer_of(bits, "reference", lengths, device, dtype)
    for x, y in zip(stored.dequantized(200), plain.dequantized(200), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    q = torch.randn(3, heads, tokens, RANK + ROTARY, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    starts = torch.tensor([0, tokens - 1, 0], device=device)
    got, want = (
        latent_decode(q[..., :RANK], q[..., RANK:], layer.kv_store(), 0.2, starts=starts, backend=backend)
        for layer, backend in ((stored, "triton"), (plain, "reference"))
    )
    # keys are latents and rotary parts, values the latents, here with zeros for as many channels as keys have
    latents, rotaries = (x.cpu() for x in dequantize(plain.kv_store(), torch.float64))
    keys, values = torch.cat((latents, rotaries), -1), torch.nn.functional.pad(latents, (0, ROTARY))
    rows = [(keys[row, :, :n], values[row, :, :n]) for row, n in enumerate(lengths)]
    for found in (got, want):
        wide = AttentionOutput(torch.nn.functional.pad(found.out, (0, ROTARY)), found.lse)
        check_exact(wide, q, rows, starts=starts.tolist(), scaling=0.2)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_replayable_step_seals_and_stores_as_the_reference(device: torch.device, bits: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    made = []
    for backend in ("triton", "reference"):
        # rows that are about to seal a block, and one that is not
        layer = layer_of(bits, "reference", [127, 63, 10], device, dtype)
        state = layer.state
        layer.pool.reserve(state.sealed, [1, 1, 1])
        layer.buffer.reserve(64, state.open)
        layer.device_counts.keep(state, *(layer.device_counts._written(x) for x in (state.sealed, state.open)))
        nonfinite, seeded = torch.zeros(1, dtype=torch.int32, device=device), torch.Generator().manual_seed(3)
        for _ in range(3):
            k = torch.randn(3, 1, 1, RANK, generator=seeded).to(device, dtype)
            v = torch.randn(3, 1, 1, ROTARY, generator=seeded).to(device, dtype)
            arrived = torch.zeros(3, dtype=torch.int32, device=device)
            store = layer.kv_store()._replace(open_len=layer.device_counts.open(state))
            append_step(k, v, store, nonfinite=nonfinite, arrived=arrived, rotate=layer.config.rotates, backend=backend)
        made.append((dequantize(store, torch.float32, layer.config.rotates), store.sealed, store.open_len, nonfinite))
    assert made[0][1].tolist() == [2, 1, 0]
    assert made[0][2].tolist() == [2, 2, 13]
    for one, other in zip(made[0][0], made[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert [x.tolist() for x in made[0][1:]] == [x.tolist() for x in made[1][1:]]
