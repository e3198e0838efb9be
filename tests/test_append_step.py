"""A step of one new token a row: it seals what is full, then appends; also as a layer takes it."""

from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_turn
from append_support import GROUPS, expected, full_store, snapshot
from choices import BACKENDS
from op_calls import append_step, decode, seal_blocks
from stores import tokens
from torch import Tensor

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.new_columns import NewColumns
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import HeadGroups

pytestmark = pytest.mark.usefixtures("poison")


@all_pairs(
    dim=[pytest.param(d, id=f"d{d}") for d in (16, 80)],
    groups=GROUPS,
    given=[pytest.param(False, id="own_scale"), pytest.param(True, id="given_scale")],
    backend=BACKENDS,
)
def test_a_step_seals_what_is_full_and_then_appends(
    dim: int, groups: HeadGroups, given: bool, backend: str, device: torch.device
) -> None:
    store = full_store(dim, groups, device)
    before, nonfinite = snapshot(store), torch.zeros(1, dtype=torch.int32, device=device)
    k, v = (tokens(4, 1, 2, dim, device=device).transpose(1, 2) for _ in range(2))
    scales = torch.rand(4, 2, 2, device=device) / 50 if given else None
    arrived = torch.zeros(4, dtype=torch.int32, device=device)
    append_step(k, v, store, given_scale=scales, nonfinite=nonfinite, arrived=arrived, backend=backend)
    assert not nonfinite.item()
    assert not arrived.any()
    assert store.sealed.tolist() == [2, 1, 1, 0]
    assert store.open_len.tolist() == [1, 7, 1, 4]
    for row, page in ((0, 0), (2, 3)):
        slot = 0
        for got in store.paged:
            own = store.order[row, slot : slot + got.k.shape[1]]
            block = [x[row, own] for x in (before.k_open, before.k_scale, before.v_open, before.v_scale)]
            k_open, k_scale, v_open, v_scale = (x[None, ..., :64] if x.dim() == 2 else x[None] for x in block)
            want = seal_blocks(k_open[:, :, :64], k_scale, v_open[..., :64].mT, v_scale, got.width, "reference")
            for name in ("k", "v", "meta", "size"):
                assert torch.equal(getattr(got, name)[page], getattr(want, name)[0]), name
            slot += len(own)
    for got, old in zip(store.paged, before.paged, strict=True):
        for x, y in zip(got[1:], old[1:], strict=True):
            assert torch.equal(x[1:3], y[1:3])
    for row, held in enumerate([0, 6, 0, 3]):
        for i, (x, codes, scale) in enumerate(((k, store.k_open, store.k_scale), (v, store.v_open.mT, store.v_scale))):
            want_codes, want_scale = expected(x[row : row + 1], None if scales is None else scales[row : row + 1, :, i])
            assert torch.equal(codes[row, :, held : held + 1], want_codes)
            assert torch.equal(scale[row, :, held : held + 1], want_scale)
    for row, held in ((1, 6), (3, 3)):
        assert torch.equal(store.k_open[row, :, :held], before.k_open[row, :, :held])
        assert torch.equal(store.v_open[row, :, :, :held], before.v_open[row, :, :, :held])


@in_turn(groups=GROUPS)
def test_a_step_of_a_sparse_layer(groups: HeadGroups, backend: str, device: torch.device) -> None:
    """The bucket of each new token goes to its place, whether the row seals or not."""
    store = full_store(80, groups, device)
    other = snapshot(store)
    k, v = (tokens(4, 2, 1, 80, device=device) for _ in range(2))
    index = torch.arange(4 * 2 * 192, device=device).view(4, 2, 192).to(torch.int16)
    buckets = -1 - torch.arange(4 * 2, device=device).view(4, 2, 1).to(torch.int16)
    want = index.clone()
    for row, place in enumerate([128, 70, 64, 3]):
        want[row, ..., place] = buckets[row, ..., 0]
    flags = [torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 4)]
    append_step(k, v, store, nonfinite=flags[0], arrived=flags[1], backend=backend)
    append_step(k, v, other, noted=(index, buckets), nonfinite=flags[0], arrived=flags[1], backend=backend)
    assert torch.equal(index, want)
    for plain, got in zip(store.paged, other.paged, strict=True):
        for x, y in zip(plain[1:], got[1:], strict=True):
            assert torch.equal(x, y)
    for name in ("sealed", "k_open", "v_open", "open_len"):
        assert torch.equal(getattr(store, name), getattr(other, name)), name


def test_a_step_reports_nan(backend: str, device: torch.device) -> None:
    store, nonfinite = full_store(16, ((4, 2),), device), torch.zeros(1, dtype=torch.int32, device=device)
    k, v = (tokens(4, 2, 1, 16, device=device) for _ in range(2))
    v[2, 1, 0, 3] = torch.inf
    append_step(
        k, v, store, nonfinite=nonfinite, arrived=torch.zeros(4, dtype=torch.int32, device=device), backend=backend
    )
    assert nonfinite.item()


def test_a_step_refuses_other_shapes() -> None:
    nonfinite, arrived = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    store = full_store(16, ((4, 2),), torch.device("cpu"))
    k = torch.zeros(4, 2, 2, 16)
    with pytest.raises(ValueError, match=r"k must be \[4, 2, 1, 16\] like the store; got \(4, 2, 2, 16\)"):
        append_step(k, k, store, nonfinite=nonfinite, arrived=arrived)
    k, index = k[:, :, :1], torch.zeros(4, 2, 192, dtype=torch.int16)
    wanted = r"noted must be an index \[4, 2, places\] and buckets \[4, 2, 1\]; got \(4, 2, 192\) and"
    with pytest.raises(ValueError, match=wanted):
        append_step(k, k, store, noted=(index, index[..., 0]), nonfinite=nonfinite, arrived=arrived)
    store = store._replace(block=128)
    with pytest.raises(ValueError, match="store must have room for 128 open tokens; it has 64"):
        append_step(k, k, store, nonfinite=nonfinite, arrived=arrived)
    whole = store._replace(block=64, k_open=store.k_open.to(torch.float16), v_open=store.v_open.to(torch.float16))
    with pytest.raises(ValueError, match=r"store must have INT8 open tokens; got torch.float16\. .* use append_tokens"):
        append_step(k, k, whole, nonfinite=nonfinite, arrived=arrived)


def feed(layer: TurboLayer, k: Tensor, v: Tensor) -> None:
    layer.append(k, v, NewColumns(k.shape[2]))
    layer.commit()


@pytest.mark.parametrize("scale", ["token", "universal"])
def test_a_layer_that_decodes_by_kernels_stores_the_same(scale: Any, device: torch.device) -> None:
    by_kernel, plain = (TurboLayer(TurboConfig(buffer_scale=scale, backend=name)) for name in ("triton", "reference"))
    k, v = (tokens(2, 2, 140, 32, device=device) for _ in range(2))
    at = 0
    for count in (50, 1, 3, 16, 1, 1):
        for layer in (by_kernel, plain):
            feed(layer, k[:, :, at : at + count], v[:, :, at : at + count])
        at += count
        assert by_kernel.lengths() == plain.lengths() == [at, at]
        assert by_kernel.kv_store().open_len.tolist() == by_kernel.state.open
        assert by_kernel.kv_store().sealed.tolist() == by_kernel.state.sealed
    for a, b in zip(by_kernel.dequantized(at), plain.dequantized(at), strict=True):
        assert torch.equal(a, b)
    by_kernel.reorder_cache(torch.tensor([1, 1]))
    assert by_kernel.kv_store().open_len.tolist() == by_kernel.state.open


def test_nan_in_a_step_is_told_when_the_block_is_sealed(device: torch.device) -> None:
    layer = TurboLayer(TurboConfig(backend="triton"), index=3)
    k, v = (tokens(1, 2, 64, 32, device=device) for _ in range(2))
    feed(layer, k[:, :, :40], v[:, :, :40])
    k[0, 1, 41, 5] = torch.nan
    feed(layer, k[:, :, 40:42], v[:, :, 40:42])
    feed(layer, k[:, :, 42:58], v[:, :, 42:58])
    with pytest.raises(ValueError, match="layer 3: keys or values hold NaN or Inf"):
        feed(layer, k[:, :, 58:64], v[:, :, 58:64])


@pytest.mark.gpu
def test_a_steady_step_waits_for_nothing() -> None:
    layer = TurboLayer(TurboConfig())
    k, v = (tokens(3, 2, 80, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    q = tokens(3, 8, 1, 64, dtype=torch.float16, device="cuda")
    feed(layer, k[:, :, :65], v[:, :, :65])
    for at in range(65, 68):
        feed(layer, k[:, :, at : at + 1], v[:, :, at : at + 1])
        decode(q, layer.kv_store(), scaling=0.125)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for at in range(68, 78):
            feed(layer, k[:, :, at : at + 1], v[:, :, at : at + 1])
            decode(q, layer.kv_store(), scaling=0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
