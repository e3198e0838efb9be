"""The open buffer: new tokens join it as the quantizer makes them, and whole blocks leave it as `seal_blocks` does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stores import make_store, tokens
from torch import Tensor

from turbo_hf.chunk import Chunk
from turbo_hf.config import TurboConfig
from turbo_hf.layer import TurboLayer
from turbo_hf.layout import KVStore, PagedHeads, empty_pages
from turbo_hf.ops.append import append_step, append_tokens, seal_open
from turbo_hf.ops.decode import decode
from turbo_hf.ops.quantize import quantize_tokens, seal_blocks
from turbo_hf.ops.rotate import rotate_keys

pytestmark = pytest.mark.usefixtures("poison")
BACKENDS = [pytest.param(name, id=name) for name in ("reference", "triton")]


def cache(lengths: Sequence[int], dim: int, device: torch.device, dtype: torch.dtype, room: int = 0) -> KVStore:
    k, v = (tokens(len(lengths), 2, max(lengths), dim, dtype=dtype, device=device) for _ in range(2))
    store = make_store(k, v, lengths)
    pad = torch.nn.functional.pad
    k_scale, v_scale = pad(store.k_scale, (0, room)), pad(store.v_scale, (0, room))
    k_open, v_open = pad(store.k_open, (0, 0, 0, room)), pad(store.v_open, (0, room))
    return store._replace(k_open=k_open, v_open=v_open, k_scale=k_scale, v_scale=v_scale)


def copy(store: KVStore) -> KVStore:
    return store._replace(**{name: getattr(store, name).clone() for name in store._fields[4:9]})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [pytest.param(False, id="own_scale"), pytest.param(True, id="given_scale")])
@pytest.mark.parametrize(
    ("m", "starts"),
    [(1, None), (5, None), (5, [0, 3, 5]), (130, None), (130, [0, 33, 130])],
    ids=["one", "several", "ragged", "prompt", "ragged_prompt"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("dim", [pytest.param(d, id=f"d{d}") for d in (16, 80)])
def test_stores_what_the_quantizer_makes(
    dim: int, dtype: torch.dtype, m: int, starts: list[int] | None, given: bool, backend: str, device: torch.device
) -> None:
    store = cache([70, 3, 72], dim, device, dtype, room=m)
    before, nonfinite = copy(store), torch.zeros(1, dtype=torch.int32, device=device)
    k, v = (tokens(3, m, 2, dim, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    scales = torch.rand(3, 2, 2, device=device) / 50 if given else None
    if scales is not None:
        scales[1, 0] = 0
    first = None if starts is None else torch.tensor(starts, device=device)
    append_tokens(k, v, store, starts=first, given_scale=scales, nonfinite=nonfinite, backend=backend)
    assert not nonfinite.item()
    for row in range(3):
        start = 0 if starts is None else starts[row]
        held, new = int(before.open_len[row]), m - start
        assert int(store.open_len[row]) == held + new
        for i, (x, codes, scale, old) in enumerate(
            ((k, store.k_open, store.k_scale, before.k_open), (v, store.v_open.mT, store.v_scale, before.v_open.mT))
        ):
            want = expected(x[row : row + 1, :, start:], None if scales is None else scales[row : row + 1, :, i])
            assert torch.equal(codes[row, :, held : held + new], want[0])
            assert torch.equal(scale[row, :, held : held + new], want[1])
            assert torch.equal(codes[row, :, :held], old[row, :, :held])


def expected(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_tokens(x, backend="reference")
    if given is not None:
        codes, scale = quantize_tokens(x, torch.where(given[..., None] > 0, given[..., None], scale), "reference")
    return codes[0], scale[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [pytest.param(d, id=f"d{d}") for d in (16, 48, 64, 80)])
def test_keys_are_rotated_on_the_way(dim: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """The same bits as after a rotation of their own, in a prompt and in a step."""
    flags = [torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 4)]
    for m in (1, 70):
        got = cache([3, 60, 64, 9], dim, device, dtype, room=m)
        want = copy(got)
        k, v = (tokens(4, m, 2, dim, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
        k[0, 0, 0, 3] = 3e4
        turned = rotate_keys(k, "reference")
        append_tokens(k, v, got, nonfinite=flags[0], rotate=True, backend=backend)
        append_tokens(turned, v, want, nonfinite=flags[0], backend="reference")
        assert_same_tokens(got, want)
    got = full_store(dim, ((4, 2),), device)
    want, k, v = snapshot(got), k[:, :, :1], v[:, :, :1]
    append_step(k, v, got, nonfinite=flags[0], arrived=flags[1], rotate=True, backend=backend)
    append_step(turned[:, :, :1], v, want, nonfinite=flags[0], arrived=flags[1], backend="reference")
    assert_same_tokens(got, want)
    assert not flags[0].item()


def assert_same_tokens(got: KVStore, want: KVStore) -> None:
    """The open tokens of two stores, bit for bit."""
    assert torch.equal(got.open_len, want.open_len)
    for row, held in enumerate(want.open_len.tolist()):
        for name in ("k_open", "k_scale", "v_scale"):
            assert torch.equal(getattr(got, name)[row, :, :held], getattr(want, name)[row, :, :held]), name
        assert torch.equal(got.v_open[row, ..., :held], want.v_open[row, ..., :held])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
def test_nan_and_inf_are_reported(which: int, bad: float, backend: str, device: torch.device) -> None:
    store, nonfinite = cache([3], 16, device, torch.float32), torch.zeros(1, dtype=torch.int32, device=device)
    new = [tokens(1, 2, 2, 16, device=device) for _ in range(2)]
    append_tokens(new[0], new[1], store, nonfinite=nonfinite, backend=backend)
    assert not nonfinite.item()
    new[which][0, 1, 1, 3] = bad
    append_tokens(new[0], new[1], store, nonfinite=nonfinite, backend=backend)
    assert nonfinite.item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m", [3, 70])
def test_max_scale_grows_to_the_largest_scales(m: int, backend: str, device: torch.device) -> None:
    store, nonfinite = (
        cache([3, 5], 16, device, torch.float32, room=m),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    k, v = (tokens(2, 2, m, 16, device=device) for _ in range(2))
    starts = torch.tensor([1, m], device=device)
    wanted = torch.stack([expected(x[:1, :, 1:], None)[1].amax(-1) for x in (k, v)], -1)
    max_scale = torch.zeros(2, 2, 2, device=device)
    max_scale[0, 1], max_scale[1] = 1e3, 0.25
    append_tokens(k, v, store, starts=starts, max_scale=max_scale, nonfinite=nonfinite, backend=backend)
    assert torch.equal(max_scale[0, 0], wanted[0])
    assert (max_scale[0, 1] == 1e3).all()
    # a row without new tokens
    assert (max_scale[1] == 0.25).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", [0, 40, 69])
def test_a_prompt_reports_nan_wherever_it_is(where: int, backend: str, device: torch.device) -> None:
    store, nonfinite = cache([3], 16, device, torch.float32, room=70), torch.zeros(1, dtype=torch.int32, device=device)
    new = tokens(1, 2, 70, 16, device=device)
    new[0, 1, where, 3] = torch.nan
    append_tokens(
        new, new, store, starts=torch.tensor([where + 1], device=device), nonfinite=nonfinite, backend=backend
    )
    # padding may hold anything
    assert not nonfinite.item()
    append_tokens(new, new, cache([3], 16, device, torch.float32, room=70), nonfinite=nonfinite, backend=backend)
    assert nonfinite.item()


FULL_GROUPS = [pytest.param(((16, 2),), id="16bit"), pytest.param(((16, 1), (4, 1)), id="16bit+4bit")]
BITS = [pytest.param(((bits, 2),), id=f"{bits}bit") for bits in (8, 4, 3, 2)]
MIXED = [pytest.param(((4, 1), (2, 1)), id="mixed")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [*BITS, *MIXED, *FULL_GROUPS])
@pytest.mark.parametrize("dim", [pytest.param(d, id=f"d{d}") for d in (16, 80)])
def test_whole_blocks_go_to_the_pages_that_the_table_names(
    dim: int, groups: tuple[tuple[int, int], ...], backend: str, device: torch.device
) -> None:
    """Rows that seal two blocks, one behind others, none, and one of two because the first has left the window."""
    lengths, counted = [140, 70, 20, 150], [2, 3, 0, 1]
    k, v = (tokens(4, 2, 150, dim, dtype=torch.float16, device=device) for _ in range(2))
    order = torch.tensor([[1, 0], [0, 1], [1, 0], [1, 0]], device=device)
    store = make_store(k, v, lengths, groups=groups, order=order, sealed=[0, 0, 0, 0])
    paged = tuple(empty_pages(bits, 9, n, dim, 64, device, torch.float16) for bits, n in groups)
    for x in (x for pages in paged for x in pages[1:]):
        x.fill_(7)
    table = torch.tensor([[4, 2, 0], [0, 1, 8], [0, 0, 0], [6, 0, 0]], device=device)
    store = store._replace(paged=paged, table=table, sealed=torch.tensor(counted, device=device))
    seal_open(store, 2, backend=backend)
    slot = 0
    for got in store.paged:
        for row, n, page in ((0, 0, 4), (0, 1, 2), (1, 0, 8), (3, 1, 6)):
            own, at = order[row, slot : slot + got.k.shape[1]], slice(64 * n, 64 * n + 64)
            parts = [x[row, own][:, at] for x in (store.k_open, store.k_scale, store.v_open.mT, store.v_scale)]
            if got.bits < 16 and parts[0].is_floating_point():
                parts = [x[0] for i in (0, 2) for x in quantize_tokens(parts[i][None], backend="reference")]
            key, key_scale, value, value_scale = (x[None] for x in parts)
            want = seal_blocks(key, key_scale, value, value_scale, got.bits, "reference")
            for name in ("k", "v", "meta", "scale"):
                assert torch.equal(getattr(got, name)[page], getattr(want, name)[0]), name
        for x in got[1:]:
            assert (x[[0, 1, 3, 5, 7]] == 7).all()
        slot += got.k.shape[1]


def full_store(dim: int, groups: tuple[tuple[int, int], ...], device: torch.device) -> KVStore:
    """Four rows, of which the first and the third have a full open block and a page for it, and cannot say more."""
    lengths, sealed = [128, 70, 64, 3], [1, 1, 0, 0]
    k, v = (tokens(4, 2, 128, dim, device=device) for _ in range(2))
    order = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])
    store = make_store(k, v, lengths, groups=groups, order=order, sealed=sealed)
    table = torch.zeros(4, 3, dtype=torch.int64, device=device)
    table[:, : store.table.shape[1]] = store.table
    # pages that no row has
    table[0, 1], table[2, 0] = 0, 3
    return store._replace(table=table)


def snapshot(store: KVStore) -> KVStore:
    """A copy that shares no memory."""
    paged = tuple(PagedHeads(pages.bits, *(x.clone() for x in pages[1:])) for pages in store.paged)
    return copy(store)._replace(paged=paged, sealed=store.sealed.clone())


GROUPS = [
    *(pytest.param(((bits, 2),), id=f"{bits}bit") for bits in (8, 4, 3, 2)),
    pytest.param(((4, 1), (2, 1)), id="mixed"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [pytest.param(False, id="own_scale"), pytest.param(True, id="given_scale")])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dim", [pytest.param(d, id=f"d{d}") for d in (16, 80)])
def test_a_step_seals_what_is_full_and_then_appends(
    dim: int, groups: tuple[tuple[int, int], ...], given: bool, backend: str, device: torch.device
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
            want = seal_blocks(k_open[:, :, :64], k_scale, v_open[..., :64].mT, v_scale, got.bits, "reference")
            for name in ("k", "v", "meta", "scale"):
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_step_of_a_sparse_layer(
    groups: tuple[tuple[int, int], ...], tables: int, backend: str, device: torch.device
) -> None:
    """The bucket of each new token goes to its place, whether the row seals or not."""
    store = full_store(80, groups, device)
    other = snapshot(store)
    k, v = (tokens(4, 2, 1, 80, device=device) for _ in range(2))
    index = torch.arange(4 * 2 * tables * 192, device=device).view(4, 2, tables, 192).to(torch.int16)
    buckets = -1 - torch.arange(4 * 2 * tables, device=device).view(4, 2, tables, 1).to(torch.int16)
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


@pytest.mark.parametrize("backend", BACKENDS)
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
    k, index = k[:, :, :1], torch.zeros(4, 2, 1, 192, dtype=torch.int16)
    wanted = r"noted must be an index \[4, 2, L, places\] and buckets \[4, 2, L, 1\]; got \(4, 2, 1, 192\) and"
    with pytest.raises(ValueError, match=wanted):
        append_step(k, k, store, noted=(index, index[..., 0]), nonfinite=nonfinite, arrived=arrived)
    store = store._replace(block=128)
    with pytest.raises(ValueError, match="store must have room for 128 open tokens; it has 64"):
        append_step(k, k, store, nonfinite=nonfinite, arrived=arrived)
    whole = store._replace(block=64, k_open=store.k_open.to(torch.float16), v_open=store.v_open.to(torch.float16))
    with pytest.raises(ValueError, match=r"store must have INT8 open tokens; got torch.float16\. .* use append_tokens"):
        append_step(k, k, whole, nonfinite=nonfinite, arrived=arrived)


def feed(layer: TurboLayer, k: Tensor, v: Tensor) -> None:
    layer.append(k, v, Chunk(k.shape[2]))
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
        assert by_kernel.store().open_len.tolist() == by_kernel.buffer.length
        assert by_kernel.store().sealed.tolist() == by_kernel.pool.sealed
    for a, b in zip(by_kernel.dense(at), plain.dense(at), strict=True):
        assert torch.equal(a, b)
    by_kernel.reorder_cache(torch.tensor([1, 1]))
    assert by_kernel.store().open_len.tolist() == by_kernel.buffer.length


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_steady_step_waits_for_nothing() -> None:
    layer = TurboLayer(TurboConfig())
    k, v = (tokens(3, 2, 80, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    q = tokens(3, 8, 1, 64, dtype=torch.float16, device="cuda")
    feed(layer, k[:, :, :65], v[:, :, :65])
    for at in range(65, 68):
        feed(layer, k[:, :, at : at + 1], v[:, :, at : at + 1])
        decode(q, layer.store(), scaling=0.125)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for at in range(68, 78):
            feed(layer, k[:, :, at : at + 1], v[:, :, at : at + 1])
            decode(q, layer.store(), scaling=0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refuses_other_shapes() -> None:
    store = cache([3], 16, torch.device("cpu"), torch.float32)
    k = torch.zeros(1, 2, 1, 16)
    with pytest.raises(ValueError, match=r"v must be \[1, 2, M, 16\] like the store; got \(1, 2, 1, 32\)"):
        append_tokens(k, torch.zeros(1, 2, 1, 32), store, nonfinite=torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"starts": torch.zeros(2, dtype=torch.int64)}, r"starts must be \[1\] on cpu; got \[2\] on cpu"),
        ({"given_scale": torch.zeros(1, 2, 1)}, r"given_scale must be \[1, 2, 2\] on cpu; got \[1, 2, 1\]"),
        ({"max_scale": torch.zeros(2, 2)}, r"max_scale must be \[1, 2, 2\] on cpu; got \[2, 2\]"),
        ({"nonfinite": torch.zeros(3, dtype=torch.int32)}, r"nonfinite must be \[1\] on cpu; got \[3\]"),
        (
            {"nonfinite": torch.zeros(1, dtype=torch.int32, device="meta")},
            r"nonfinite must be \[1\] on cpu; got \[1\] on meta",
        ),
    ],
)
def test_refuses_what_does_not_belong_to_the_store(wrong: dict[str, Any], message: str) -> None:
    store = cache([3], 16, torch.device("cpu"), torch.float32)
    k = torch.zeros(1, 2, 1, 16)
    with pytest.raises(ValueError, match=message):
        append_tokens(k, k, store, **{"nonfinite": torch.zeros(1, dtype=torch.int32), **wrong})


def test_refuses_more_tokens_than_there_is_room_for() -> None:
    store = cache([3], 16, torch.device("cpu"), torch.float32)
    room = store.k_open.shape[2]
    k = torch.zeros(1, 2, room + 1, 16)
    with pytest.raises(ValueError, match=f"k brings {room + 1} tokens a row; the store has room for {room}"):
        append_tokens(k, k, store, nonfinite=torch.zeros(1, dtype=torch.int32))


def test_more_pairs_than_a_launch_takes_are_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    launch_store = pytest.importorskip("turbo_hf.ops.launch_store")
    monkeypatch.setattr(launch_store, "MOST_PAIRS", 5)
    with pytest.raises(ValueError, match="3 rows of 2 KV heads are more than the 5 pairs that a launch takes"):
        quantize_tokens(torch.randn(3, 2, 8, 16, device=device), backend="triton")
    assert quantize_tokens(torch.randn(2, 2, 8, 16, device=device), backend="triton")[0].shape == (2, 2, 8, 16)
