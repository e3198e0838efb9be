"""Kernels of latent attention against the reference in plain torch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budgets import check, check_exact, float_budget, largest, score_noise, score_size
from choices import flat_config
from gluon_numpy import Block, Pointer, kernel_in_numpy
from op_calls import append_step, append_tokens, latent_decode, named_decode, seal_open
from oracle import oracle
from stores import tokens

import turbo_hf
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.layout import AttentionOutput, Scoring
from turbo_hf.ops import gpu
from turbo_hf.ops.store.quantize import dequantize

RANK, ROTARY = 64, 16
LOG2_E = 1 / math.log(2)


def layer_of(
    bits: int, backend: Any, lengths: list[int], device: torch.device, dtype: torch.dtype,
    sizes: tuple[int, int] = (RANK, ROTARY),
) -> Any:  # fmt: skip
    """A latent layer that holds random rows of these lengths, left-padded. sizes: their channels, rotary parts'."""
    longest, seeded = max(lengths), torch.Generator().manual_seed(1)
    latent, rotary = (torch.randn(len(lengths), 1, longest, n, generator=seeded).to(device, dtype) for n in sizes)
    starts = [longest - n for n in lengths]
    valid = torch.arange(longest, device=device) >= torch.tensor(starts, device=device)[:, None]
    new = NewColumns(longest, valid, starts) if any(starts) else NewColumns(longest)
    layer = TurboLayer(flat_config(bits=bits, backend=backend), latent=True)
    layer.append(latent, rotary, new)
    layer.commit()
    return layer


@pytest.mark.parametrize(("bits", "heads", "tokens"), [(16, 3, 1), (8, 16, 2), (4, 3, 5), (4, 40, 1)])
def test_a_step_over_latents_is_that_of_the_reference(device: torch.device, bits: int, heads: int, tokens: int) -> None:
    dtype, lengths = torch.float32 if device.type == "cpu" else torch.bfloat16, [200, 70, 7]
    stored, plain = (layer_of(bits, backend, lengths, device, dtype) for backend in ("triton", "reference"))
    for x, y in zip(stored.dequantized(200), plain.dequantized(200), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    check_step(bits, heads, tokens, stored, plain, lengths)


@pytest.mark.parametrize(
    ("bits", "heads", "tokens", "lengths"),
    [(4, 16, 1, [337, 90]), (8, 5, 3, [192, 130]), (4, 2, 1, [70, 7])],
    ids=["open tokens", "a draft", "few blocks"],
)
@pytest.mark.parametrize("in_turns", [False, True])
def test_the_kernel_for_hopper_in_numpy_is_the_reference(
    bits: int, heads: int, tokens: int, lengths: list[int], in_turns: bool
) -> None:
    rank, rotary, shares, batch, count = 128, 64, 3, len(lengths), heads * tokens
    layer = layer_of(bits, "reference", lengths, torch.device("cpu"), torch.float32, (rank, rotary))
    store = layer.kv_store()
    (pages,) = store.paged
    seeded = torch.Generator().manual_seed(4)
    q, q_rotary = (torch.randn(batch, heads, tokens, n, generator=seeded) for n in (rank, rotary))
    want = latent_decode(q, q_rotary, store, 0.1, backend="reference")
    parts, lse = np.zeros((batch, shares, count, rank), np.float32), np.zeros((batch, shares, count), np.float32)
    opened = store.k_open, store.v_open, store.k_scale, store.v_scale
    places = store.table, store.sealed, store.open_len
    file = Path(turbo_hf.__file__).parent / "ops" / "latent" / "kernel_hopper.py"
    kernel_in_numpy(file, "hopper_latent_kernel")(
        (shares, 1, batch),
        *(Pointer(x.flatten().numpy()) for x in (q, q_rotary, *pages[1:-1], pages.size.float(), *opened, *places)),
        *(Pointer(x.reshape(-1)) for x in (parts, lse)),
        *(Block(np.int32(x)) for x in (store.table.stride(0), store.k_open.shape[2])), 0.1 * LOG2_E,
        Block(np.int32(count)), RANK=rank, ROTARY=rotary, BITS=bits, ROWS=16, TOKENS=tokens, WARPS=4,
        OVERLAP=in_turns,
    )  # fmt: skip
    top = lse.max(1, keepdims=True)
    weights = np.exp2(lse - top)
    total = weights.sum(1, keepdims=True)
    got = torch.from_numpy((parts * (weights / total)[..., None]).sum(1)).view_as(want.out)
    # float16 has 11 bits, and each of two products rounds an operand to it
    assert (got - want.out).norm() < 2**-11 * want.out.norm()
    found = torch.from_numpy((top + np.log2(total))[:, 0] / LOG2_E).view_as(want.lse)
    torch.testing.assert_close(found, want.lse, rtol=0, atol=2**-11)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "heads", "tokens", "sizes"),
    [(4, 16, 1, (512, 64)), (8, 10, 1, (512, 64)), (8, 20, 1, (512, 64)), (4, 7, 3, (256, 32))],
)
def test_a_step_of_the_hopper_kernel_is_the_references(
    bits: int, heads: int, tokens: int, sizes: tuple[int, int]
) -> None:
    if not gpu.hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU and Triton's Gluon")
    lengths = [1500, 70, 7]
    layer = layer_of(bits, "reference", lengths, torch.device("cuda"), torch.bfloat16, sizes)
    check_step(bits, heads, tokens, layer, layer, lengths)


def check_step(bits: int, heads: int, tokens: int, stored: Any, plain: Any, lengths: list[int]) -> None:
    """A step over the latents of these layers, of kernels and of the reference, both against float64."""
    device, (rank, rotary) = plain.kv_store().k_open.device, (plain.buffer.k.shape[-1], plain.buffer.v.shape[2])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(3, heads, tokens, rank + rotary, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    starts = torch.tensor([0, tokens - 1, 0], device=device)
    got, want = (
        latent_decode(q[..., :rank], q[..., rank:], layer.kv_store(), 0.2, starts=starts, backend=backend)
        for layer, backend in ((stored, "triton"), (plain, "reference"))
    )
    # keys are latents and rotary parts, values the latents, here with zeros for as many channels as keys have
    latents, rotaries = (x.cpu() for x in dequantize(plain.kv_store(), torch.float64))
    keys, values = torch.cat((latents, rotaries), -1), torch.nn.functional.pad(latents, (0, rotary))
    rows = [(keys[row, :, :n], values[row, :, :n]) for row, n in enumerate(lengths)]
    for found in (got, want):
        wide = AttentionOutput(torch.nn.functional.pad(found.out, (0, rotary)), found.lse)
        check_exact(wide, q, rows, starts=starts.tolist(), scaling=0.2)


@pytest.mark.parametrize(
    ("bits", "heads", "tokens", "sinks"), [(16, 3, 1, False), (8, 40, 2, True), (4, 3, 3, True), (4, 16, 1, False)]
)
@pytest.mark.parametrize("split", [None, (16, 16, 3, 4), (32, 64, 1, 8)], ids=["chosen", "shares", "one tile"])
def test_attention_over_named_latents_is_exact(
    device: torch.device, bits: int, heads: int, tokens: int, sinks: bool, split: Any
) -> None:
    from turbo_hf.ops.latent import launch  # noqa: PLC0415 - needs Triton

    dtype, lengths, named = torch.float32 if device.type == "cpu" else torch.bfloat16, [200, 130, 7], 50
    store = layer_of(bits, "reference", lengths, device, dtype).kv_store()
    seeded = torch.Generator().manual_seed(5)
    q = torch.randn(3, heads, tokens, RANK + ROTARY, generator=seeded).to(device, dtype)
    # what may not be seen lies anywhere
    places = torch.full((3, tokens, named), 1 << 40)
    seen = torch.rand(3, tokens, named, generator=seeded) < 0.8
    for row, query in np.ndindex(3, tokens):
        some = torch.randperm(lengths[row], generator=seeded)[:named]
        places[row, query, : len(some)] = some
        seen[row, query, len(some) :] = False
    seen[0, -1] = False
    scoring = Scoring(0.2, sinks=torch.randn(heads, generator=seeded).to(device) if sinks else None)
    given = q[..., :RANK], q[..., RANK:], store, places.to(device), seen.to(device), scoring
    # keys are latents and rotary parts, values the latents, here with zeros for as many channels as keys have
    latents, rotaries = (x.cpu() for x in dequantize(store, torch.float64))
    keys, values = torch.cat((latents, rotaries), -1), torch.nn.functional.pad(latents, (0, ROTARY))
    asked = [(row, query) for row, query in np.ndindex(3, tokens) if seen[row, query].any()]
    at = {(row, query): places[row, query][seen[row, query]] for row, query in asked}
    rows = [(keys[row][:, at[row, query]], values[row][:, at[row, query]]) for row, query in asked]
    one = torch.stack([q[row, :, query, None] for row, query in asked])
    how: dict[str, Any] = {"scaling": 0.2, "sinks": scoring.sinks}
    want, eager = oracle(one, rows, **how), oracle(one, rows, dtype=dtype, **how)
    noise = score_noise(want, rows, score_size(one, rows, 0.2) + largest(want.lse))
    budget = noise + float_budget(want.out, eager.out, max(largest(v) for _, v in rows), dtype)
    tiles = None if split is None else launch.NamedTiles(*split)
    for out in (
        launch.launch_named_decode(*given, device.type == "cpu", tiles),
        named_decode(*given, backend="reference"),
        named_decode(*given, backend="triton"),
    ):
        assert out.dtype == dtype
        found = torch.stack([out[row, :, query, None] for row, query in asked])
        check("out", torch.nn.functional.pad(found, (0, ROTARY)), want.out, budget)
        assert not out[0, :, -1].any()


def test_names_of_other_shapes_are_refused(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    store = layer_of(4, "reference", [70, 7], device, dtype).kv_store()
    q, q_rotary = (torch.zeros(2, 3, 1, n, device=device, dtype=dtype) for n in (RANK, ROTARY))
    places = torch.zeros(2, 1, 5, dtype=torch.int64, device=device)
    for one, other, name in (
        (places.int(), places, "places"),
        (places, places, "seen"),
        (places[:1], places, "places"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be torch"):
            named_decode(q, q_rotary, store, one, other, Scoring(1.0))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_replayable_step_seals_and_stores_as_the_reference(device: torch.device, bits: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    made = []
    for backend in ("triton", "reference"):
        # rows that are about to seal a block, and one that is not
        layer = layer_of(bits, "reference", [127, 63, 10], device, dtype)
        state = layer.state
        layer.pool.follow(layer.pool.table.reserve(state.sealed, [1, 1, 1]))
        layer.buffer.reserve(64, state.open)
        layer.device_counts.keep(state, *(layer.device_counts._written(x) for x in (state.sealed, state.open)))
        nonfinite, seeded = torch.zeros(1, dtype=torch.int32, device=device), torch.Generator().manual_seed(3)
        for _ in range(3):
            k = torch.randn(3, 1, 1, RANK, generator=seeded).to(device, dtype)
            v = torch.randn(3, 1, 1, ROTARY, generator=seeded).to(device, dtype)
            arrived = torch.zeros(3, dtype=torch.int32, device=device)
            store = layer.kv_store()._replace(open_len=layer.device_counts.open(state))
            append_step(k, v, store, nonfinite=nonfinite, arrived=arrived, backend=backend)
        made.append((dequantize(store, torch.float32), store.sealed, store.open_len, nonfinite))
    assert made[0][1].tolist() == [2, 1, 0]
    assert made[0][2].tolist() == [2, 2, 13]
    for one, other in zip(made[0][0], made[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert [x.tolist() for x in made[0][1:]] == [x.tolist() for x in made[1][1:]]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_whole_blocks_are_sealed_as_the_reference_seals_them(device: torch.device, bits: int) -> None:
    dtype, made = torch.float32 if device.type == "cpu" else torch.bfloat16, []
    for backend in ("triton", "reference"):
        layer = layer_of(bits, "reference", [127, 63, 10], device, dtype)
        state, seeded = layer.state, torch.Generator().manual_seed(3)
        layer.pool.follow(layer.pool.table.reserve(state.sealed, [2, 1, 1]))
        layer.buffer.reserve(160, state.open)
        store, nonfinite = layer.kv_store(), torch.zeros(1, dtype=torch.int32, device=device)
        store = store._replace(open_len=store.open_len.clone(), sealed=store.sealed.clone())
        k, v = (torch.randn(3, 1, 70, n, generator=seeded).to(device, dtype) for n in (RANK, ROTARY))
        append_tokens(k, v, store, nonfinite=nonfinite, backend=backend)
        # two blocks, two blocks of which the first has left, and one
        whole = torch.tensor([2, 1, 1], device=device)
        seal_open(store._replace(sealed=store.sealed + whole), 2, backend=backend)
        made.append([x[store.table[row, int(store.sealed[row])]] for row in range(3) for x in store.paged[0][1:]])
        made[-1].append(store.paged[0].k[store.table[0, 2]])
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bits", [16, 8])
def test_latents_behind_a_block_take_its_place(device: torch.device, bits: int) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for backend in ("triton", "reference"):
        layer = layer_of(bits, "reference", [63, 30], device, dtype)
        layer.pool.follow(layer.pool.table.reserve(layer.state.sealed, [1, 1]))
        layer.buffer.reserve(96, layer.state.open)
        store, nonfinite = layer.kv_store(), torch.zeros(1, dtype=torch.int32, device=device)
        store = store._replace(open_len=store.open_len.clone(), sealed=torch.tensor([1, 0], device=device))
        k, v = (tokens(2, 1, 12, n, device=device) for n in (RANK, ROTARY))
        append_tokens(k, v, store, nonfinite=nonfinite)
        opened = (store.k_open.mT, store.v_open, store.k_scale, store.v_scale)
        want = [torch.stack((x[0, ..., 64:75], x[1, ..., :11])) for x in opened]
        seal_open(store, 1, moves=True, backend=backend)
        for x, y in zip(opened, want, strict=True):
            assert torch.equal(x[..., :11], y)
