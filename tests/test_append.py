"""The open buffer: tokens join it as the quantizer makes them, blocks leave it as they are sealed, rows change."""

from collections.abc import Sequence
from typing import Any

import op_calls as ops
import pytest
import torch
from choices import flat_config
from stores import make_store, tokens
from torch import Tensor

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import FIRST, HeadGroups, KVStore, PagedHeads, empty_pages
from turbo_hf.ops.maths import balanced_keys, balanced_queries
from turbo_hf.ops.store.contract import MOST_ROWS, Opened

pytestmark = pytest.mark.usefixtures("poison")

GROUPS = [
    *(pytest.param(((bits, 2),), id=f"{bits}bit") for bits in (8, 4, 3, 2)),
    pytest.param(((4, 1), (2, 1)), id="mixed"),
    pytest.param((((4, 2), 1), ((8, 3), 1)), id="pairs"),
    pytest.param((((3, 8), 1), ((2, 4), 1)), id="wide-values"),
]


def cache(lengths: Sequence[int], dim: int, device: torch.device, dtype: torch.dtype, room: int = 0) -> KVStore:
    k, v = (tokens(len(lengths), 2, max(lengths), dim, dtype=dtype, device=device) for _ in range(2))
    store = make_store(k, v, lengths)
    pad = torch.nn.functional.pad
    k_scale, v_scale = pad(store.k_scale, (0, room)), pad(store.v_scale, (0, room))
    k_open, v_open = pad(store.k_open, (0, 0, 0, room)), pad(store.v_open, (0, room))
    return store._replace(k_open=k_open, v_open=v_open, k_scale=k_scale, v_scale=v_scale)


def copy(store: KVStore) -> KVStore:
    return store._replace(**{name: getattr(store, name).clone() for name in store._fields[4:9]})


def expected(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = ops.quantize_tokens(x, backend="reference")
    return codes[0], scale[0]


def full_store(dim: int, groups: HeadGroups, device: torch.device, first: int = 0, recent: int = 0) -> KVStore:
    """Four rows, of which the first and the third have a block that is due and a page for it, and no room for more."""
    stay = first + recent
    lengths, sealed = [stay + 128, stay + 70, stay + 64, 3], [1, 1, 0, 0]
    k, v = (tokens(4, 2, stay + 128, dim, device=device) for _ in range(2))
    order = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])
    store = make_store(k, v, lengths, groups=groups, order=order, sealed=sealed)
    table = torch.zeros(4, 3, dtype=torch.int64, device=device)
    table[:, : store.table.shape[1]] = store.table
    # pages that no row has
    table[0, 1], table[2, 0] = 0, 3
    return store._replace(table=table, first=first, recent=recent)


def snapshot(store: KVStore) -> KVStore:
    """A copy that shares no memory."""
    paged = tuple(PagedHeads(pages.bits, *(x.clone() for x in pages[1:])) for pages in store.paged)
    return copy(store)._replace(paged=paged, sealed=store.sealed.clone())


@pytest.mark.parametrize(
    ("m", "starts", "dim", "dtype"),
    [
        (1, None, 16, torch.float16), (1, None, 80, torch.float32), (5, None, 80, torch.float16),
        (5, [0, 3, 5], 16, torch.float32), (5, [0, 3, 5], 80, torch.float16), (130, None, 80, torch.float32),
        (130, [0, 33, 130], 16, torch.float16), (130, [0, 33, 130], 80, torch.float32),
    ],
)  # fmt: skip
def test_stores_what_the_quantizer_makes(
    m: int, starts: list[int] | None, dim: int, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    store = cache([70, 3, 72], dim, device, dtype, room=m)
    before, nonfinite = copy(store), torch.zeros(1, dtype=torch.int32, device=device)
    k, v = (tokens(3, m, 2, dim, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    first = None if starts is None else torch.tensor(starts, device=device)
    ops.append_tokens(k, v, store, starts=first, nonfinite=nonfinite, backend=backend)
    assert not nonfinite.item()
    for row in range(3):
        start = 0 if starts is None else starts[row]
        held, new = int(before.open_len[row]), m - start
        assert int(store.open_len[row]) == held + new
        for x, codes, scale, old in (
            (k, store.k_open, store.k_scale, before.k_open),
            (v, store.v_open.mT, store.v_scale, before.v_open.mT),
        ):
            want = expected(x[row : row + 1, :, start:])
            assert torch.equal(codes[row, :, held : held + new], want[0])
            assert torch.equal(scale[row, :, held : held + new], want[1])
            assert torch.equal(codes[row, :, :held], old[row, :, :held])


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(16, torch.bfloat16), (48, torch.float32), (64, torch.bfloat16), (80, torch.float32), (512, torch.bfloat16)],
)
def test_keys_are_balanced_on_the_way(dim: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """The same bits as after a division of their own, in a prompt and in a step; queries too."""
    balance = 1 + 5 * torch.rand(2, dim, device=device)
    flags = [torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 4)]
    for m in (1, 70):
        got = cache([3, 60, 64, 9], dim, device, dtype, room=m)
        want = copy(got)
        k, v = (tokens(4, m, 2, dim, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
        k[0, 0, 0, 3] = 3e4
        divided = balanced_keys(k, balance)
        # a view, whose rows of 6 heads are cut by programs of 4
        # not bfloat16, to which the interpreter rounds otherwise
        kind = torch.float32 if dtype == torch.float32 else torch.float16
        q = tokens(4, m, 6, dim, dtype=kind, device=device).transpose(1, 2)
        out: Any = ops.append_tokens(k, v, got, nonfinite=flags[0], balance=balance, queries=q, backend=backend)
        ops.append_tokens(divided, v, want, nonfinite=flags[0], backend="reference")
        assert_same_tokens(got, want)
        assert torch.equal(out, balanced_queries(q, balance))
    got = full_store(dim, ((4, 2),), device)
    want, k, v = snapshot(got), k[:, :, :1], v[:, :, :1]
    q = q[:, :, :1]
    out = ops.append_step(k, v, got, nonfinite=flags[0], arrived=flags[1], balance=balance, queries=q, backend=backend)
    assert out is not None
    assert torch.equal(out, balanced_queries(q, balance))
    ops.append_step(divided[:, :, :1], v, want, nonfinite=flags[0], arrived=flags[1], backend="reference")
    assert_same_tokens(got, want)
    assert not flags[0].item()


def assert_same_tokens(got: KVStore, want: KVStore) -> None:
    """The open tokens of two stores, bit for bit."""
    assert torch.equal(got.open_len, want.open_len)
    for row, held in enumerate(want.open_len.tolist()):
        for name in ("k_open", "k_scale", "v_scale"):
            assert torch.equal(getattr(got, name)[row, :, :held], getattr(want, name)[row, :, :held]), name
        assert torch.equal(got.v_open[row, ..., :held], want.v_open[row, ..., :held])


@pytest.mark.parametrize(
    ("m", "where", "which", "bad"),
    [(2, 1, 0, torch.nan), (2, 1, 1, torch.inf), (70, 0, 0, torch.inf), (70, 40, 1, torch.nan), (70, 69, 0, torch.nan)],
)
def test_nan_and_inf_are_reported(
    m: int, where: int, which: int, bad: float, backend: str, device: torch.device
) -> None:
    nonfinite, new = torch.zeros(1, dtype=torch.int32, device=device), [tokens(1, 2, m, 16, device=device)] * 2
    new[which] = new[which].clone()
    new[which][0, 1, where, 3] = bad
    # padding may hold anything
    for starts in (torch.tensor([where + 1], device=device), None):
        assert not nonfinite.item()
        store = cache([3], 16, device, torch.float32, room=m)
        ops.append_tokens(new[0], new[1], store, starts=starts, nonfinite=nonfinite, backend=backend)
    assert nonfinite.item()


FULL = pytest.param(((16, 2),), id="16bit")


@pytest.mark.parametrize("groups", [*GROUPS, FULL])
def test_whole_blocks_go_to_the_pages_that_the_table_names(
    groups: HeadGroups, backend: str, device: torch.device
) -> None:
    """Rows that seal two blocks, one behind others, none, and one of two because the first has left the window."""
    dim = 80 if len(groups) == 1 else 16
    # the first tokens of all but one width stay open
    first = 0 if groups == ((8, 2),) else FIRST
    lengths, counted = [first + 140, first + 70, 20, first + 150], [2, 3, 0, 1]
    k, v = (tokens(4, 2, first + 150, dim, dtype=torch.float16, device=device) for _ in range(2))
    order = torch.tensor([[1, 0], [0, 1], [1, 0], [1, 0]], device=device)
    store = make_store(k, v, lengths, groups=groups, order=order, sealed=[0, 0, 0, 0])
    paged = tuple(empty_pages(width, 9, n, dim, 64, device, torch.float16) for width, n in groups)
    for x in (x for pages in paged for x in pages[1:]):
        x.fill_(7)
    table = torch.tensor([[4, 2, 0], [0, 1, 8], [0, 0, 0], [6, 0, 0]], device=device)
    store = store._replace(paged=paged, table=table, sealed=torch.tensor(counted, device=device), first=first)
    ops.seal_open(store, 2, backend=backend)
    slot = 0
    for got in store.paged:
        for row, n, page in ((0, 0, 4), (0, 1, 2), (1, 0, 8), (3, 1, 6)):
            own, at = order[row, slot : slot + got.k.shape[1]], slice(first + 64 * n, first + 64 * n + 64)
            parts = [x[row, own][:, at] for x in (store.k_open, store.k_scale, store.v_open.mT, store.v_scale)]
            key, key_scale, value, value_scale = (x[None] for x in parts)
            want = ops.seal_blocks(key, key_scale, value, value_scale, got.width, "reference")
            for name in ("k", "v", "meta", "size"):
                assert torch.equal(getattr(got, name)[page], getattr(want, name)[0]), name
        for x in got[1:]:
            assert (x[[0, 1, 3, 5, 7]] == 7).all()
        slot += got.k.shape[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"v": torch.zeros(1, 2, 1, 32)}, r"v must be \[1, 2, 1, 16\] on cpu; got torch.float32 \[1, 2, 1, 32\]"),
        ({"k": torch.zeros(1, 2, 1, 16, device="meta")}, r"k must be \[1, 2, M, 16\] on cpu; got .* on meta"),
        ({"queries": torch.zeros(1, 4, 2, 16)}, r"queries must be \[1, Hq, 1, 16\] on cpu; got .*\[1, 4, 2, 16\]"),
        ({"queries": torch.zeros(1, 3, 1, 16)}, "queries must be of a multiple of 2 heads; got 3"),
    ],
)
def test_refuses_what_does_not_belong_to_the_store(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"nonfinite": torch.zeros(1, dtype=torch.int32)}
    given |= {name: torch.zeros(1, 2, 1, 16) for name in ("k", "v")} | wrong
    with pytest.raises(ValueError, match=message):
        ops.append_tokens(store=cache([3], 16, torch.device("cpu"), torch.float32), **given)


def test_more_pairs_than_a_launch_takes_are_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    launch_store = pytest.importorskip("turbo_hf.ops.store.launch")
    monkeypatch.setattr(launch_store, "MOST_PAIRS", 5)
    with pytest.raises(ValueError, match="3 rows of 2 KV heads are more than the 5 pairs that a launch takes"):
        ops.quantize_tokens(torch.randn(3, 2, 8, 16, device=device), backend="triton")
    assert ops.quantize_tokens(torch.randn(2, 2, 8, 16, device=device), backend="triton")[0].shape == (2, 2, 8, 16)


@pytest.mark.parametrize("dim", [16, 80, 512])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_step_seals_what_is_full_and_then_appends(
    dim: int, groups: HeadGroups, backend: str, device: torch.device
) -> None:
    first, recent = (0, 0) if groups == ((8, 2),) else (FIRST, 128 if dim == 16 else 64)
    stay = first + recent
    store = full_store(dim, groups, device, first, recent)
    before, nonfinite = snapshot(store), torch.zeros(1, dtype=torch.int32, device=device)
    k, v = (tokens(4, 1, 2, dim, device=device).transpose(1, 2) for _ in range(2))
    arrived = torch.zeros(4, dtype=torch.int32, device=device)
    ops.append_step(k, v, store, nonfinite=nonfinite, arrived=arrived, backend=backend)
    assert not nonfinite.item()
    assert not arrived.any()
    assert store.sealed.tolist() == [2, 1, 1, 0]
    assert store.open_len.tolist() == [stay + 1, stay + 7, stay + 1, 4]
    for row, page in ((0, 0), (2, 3)):
        slot = 0
        for got in store.paged:
            own = store.order[row, slot : slot + got.k.shape[1]]
            block = [x[row, own] for x in (before.k_open, before.k_scale, before.v_open, before.v_scale)]
            at = slice(first, first + 64)
            k_open, k_scale, v_open, v_scale = (x[None, ..., at] if x.dim() == 2 else x[None] for x in block)
            want = ops.seal_blocks(k_open[:, :, at], k_scale, v_open[..., at].mT, v_scale, got.width, "reference")
            for name in ("k", "v", "meta", "size"):
                assert torch.equal(getattr(got, name)[page], getattr(want, name)[0]), name
            slot += len(own)
    for got, old in zip(store.paged, before.paged, strict=True):
        for x, y in zip(got[1:], old[1:], strict=True):
            assert torch.equal(x[1:3], y[1:3])
    for row, held in enumerate([stay, stay + 6, stay, 3]):
        for x, codes, scale in ((k, store.k_open, store.k_scale), (v, store.v_open.mT, store.v_scale)):
            want_codes, want_scale = expected(x[row : row + 1])
            assert torch.equal(codes[row, :, held : held + 1], want_codes)
            assert torch.equal(scale[row, :, held : held + 1], want_scale)
    # what is behind the block takes its place
    assert_same_tokens(
        store._replace(open_len=torch.tensor([stay, stay + 6, stay, 3], device=store.open_len.device)),
        moved(before, [0, 2]),
    )


def moved(store: KVStore, rows: list[int]) -> KVStore:
    """The open tokens of a store without the block behind the first ones in these rows."""
    after, begin, end = copy(store), store.first, store.first + store.block
    for row in rows:
        after.open_len[row] -= store.block
        for x in (after.k_open.mT, after.v_open, after.k_scale, after.v_scale):
            x[row] = torch.cat((x[row, ..., :begin], x[row, ..., end:], x[row, ..., :64]), -1)
    return after


@pytest.mark.parametrize("groups", [*GROUPS, FULL])
@pytest.mark.parametrize("recent", [0, 64])
def test_tokens_behind_a_block_take_its_place(
    recent: int, groups: HeadGroups, backend: str, device: torch.device
) -> None:
    """As steps of several tokens leave them: more than the recent ones, just those, and where nothing is due."""
    stay = FIRST + recent
    lengths, sealed = [stay + 64 + 15, stay + 64, stay + 63, 3], [1, 1, 0, 0]
    k, v = (tokens(4, 2, max(lengths), 48, dtype=torch.float16, device=device) for _ in range(2))
    order = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]], device=device)
    made = make_store(k, v, lengths, groups=groups, order=order, sealed=[0] * 4)
    paged = tuple(empty_pages(width, 3, n, 48, 64, device, torch.float16) for width, n in groups)
    table, counted = torch.tensor([[2], [1], [0], [0]], device=device), torch.tensor(sealed, device=device)
    store = made._replace(paged=paged, table=table, sealed=counted, first=FIRST, recent=recent)
    plain = snapshot(store)
    ops.seal_open(plain, 1, backend=backend)
    before = snapshot(store)
    ops.seal_open(store, 1, moves=True, backend=backend)
    for got, like in zip(store.paged, plain.paged, strict=True):
        for x, y in zip(got[1:], like[1:], strict=True):
            assert torch.equal(x[1:], y[1:])
    want = moved(before, [0, 1])
    assert torch.equal(store.open_len, before.open_len), "the caller counts them"
    assert_same_tokens(store._replace(open_len=want.open_len), want)


@pytest.mark.parametrize("groups", GROUPS)
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
    ops.append_step(k, v, store, nonfinite=flags[0], arrived=flags[1], backend=backend)
    ops.append_step(k, v, other, noted=(index, buckets), nonfinite=flags[0], arrived=flags[1], backend=backend)
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
    ops.append_step(
        k, v, store, nonfinite=nonfinite, arrived=torch.zeros(4, dtype=torch.int32, device=device), backend=backend
    )
    assert nonfinite.item()


def test_a_step_refuses_other_shapes() -> None:
    nonfinite, arrived = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    store = full_store(16, ((4, 2),), torch.device("cpu"))
    k = torch.zeros(4, 2, 2, 16)
    with pytest.raises(ValueError, match=r"k must be \[4, 2, 1, 16\] on cpu; got torch.float32 \[4, 2, 2, 16\]"):
        ops.append_step(k, k, store, nonfinite=nonfinite, arrived=arrived)


def feed(layer: TurboLayer, k: Tensor, v: Tensor) -> None:
    layer.append(k, v, NewColumns(k.shape[2]))
    layer.commit()


def test_a_layer_that_decodes_by_kernels_stores_the_same(device: torch.device) -> None:
    by_kernel, plain = (TurboLayer(flat_config(backend=name)) for name in ("triton", "reference"))
    k, v = (tokens(2, 2, FIRST + 140, 32, device=device) for _ in range(2))
    at = 0
    for count in (FIRST + 50, 1, 3, 16, 1, 1):
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
    layer = TurboLayer(flat_config(backend="triton", recent_tokens=0), index=3)
    k, v = (tokens(1, 2, 80, 32, device=device) for _ in range(2))
    feed(layer, k[:, :, :56], v[:, :, :56])
    k[0, 1, 57, 5] = torch.nan
    feed(layer, k[:, :, 56:58], v[:, :, 56:58])
    feed(layer, k[:, :, 58:74], v[:, :, 58:74])
    with pytest.raises(ValueError, match="layer 3: keys or values hold NaN or Inf"):
        feed(layer, k[:, :, 74:80], v[:, :, 74:80])


@pytest.mark.gpu
def test_a_steady_step_waits_for_nothing() -> None:
    layer = TurboLayer(TurboConfig())
    k, v = (tokens(3, 2, 80, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    q = tokens(3, 8, 1, 64, dtype=torch.float16, device="cuda")
    feed(layer, k[:, :, :65], v[:, :, :65])
    for at in range(65, 68):
        feed(layer, k[:, :, at : at + 1], v[:, :, at : at + 1])
        ops.decode(q, layer.kv_store(), scaling=0.125)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for at in range(68, 78):
            feed(layer, k[:, :, at : at + 1], v[:, :, at : at + 1])
            ops.decode(q, layer.kv_store(), scaling=0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")


BLOCK, ROOM = 32, 48


def some_open(count: int, tokens: int, dims: tuple[int, int], device: torch.device) -> Opened:
    # latents, which are wider than their rotary parts, are in 16 bit
    dtype = torch.int8 if dims[0] == dims[1] else torch.float16
    codes = [
        torch.randint(-127, 128, shape).to(dtype)
        for shape in ((count, 2, tokens, dims[0]), (count, 2, dims[1], tokens))
    ]
    k, v, k_scale, v_scale = (x.to(device) for x in (*codes, *torch.rand(2, count, 2, tokens)))
    return k, v, k_scale.contiguous(), v_scale.contiguous()


@pytest.mark.parametrize(("dims", "begin"), [((16, 16), 0), ((80, 80), FIRST), ((160, 32), 0)])
def test_slots_and_blocks_exchange_open_tokens(
    dims: tuple[int, int], begin: int, backend: str, device: torch.device
) -> None:
    torch.manual_seed(dims[0])
    blocks, slots = some_open(7, BLOCK, dims, device), some_open(6, ROOM, dims, device)
    # one block each, several, nothing held, and two of no request that share a slot and a row
    requests = [(3, 0, 0, 5), (0, 1, 3, 31), (1, 4, 4, 0), (5, 6, 6, 0), (5, 6, 6, 0)]
    want_blocks, want_slots = (tuple(x.clone() for x in each) for each in (blocks, slots))
    for slot, first, last, held in requests:
        for x, y, at in zip(want_blocks, want_slots, (1, 2, 1, 1), strict=True):
            x[first].narrow(at, 0, held).copy_(y[slot].narrow(at, begin, held))
            y[slot].narrow(at, begin, BLOCK).copy_(x[last])
    index = (torch.tensor(x, device=device) for x in zip(*requests, strict=True))
    ops.exchange_open(blocks, slots, *index, begin, backend=backend)
    for got, want in ((blocks, want_blocks), (slots, want_slots)):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def some_tensors(rows: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, 2, 16, 6), dtype=torch.int8, generator=generator)
    order = torch.randint(0, 9, (rows, 3), generator=generator)
    long = torch.randn(rows, 2, 5000 // rows, generator=generator)
    return [x.to(device) for x in (codes, order, long, torch.randn(rows, 1, generator=generator))]


@pytest.mark.parametrize("rows", [1, 3, 4, 37])
def test_each_row_becomes_the_named_one(rows: int, backend: str, device: torch.device) -> None:
    tensors = some_tensors(rows, device)
    before, places = [x.clone() for x in tensors], [x.data_ptr() for x in tensors]
    for turn in range(3):
        order = torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(turn)).tolist()
        ops.select_rows(tensors, order, backend=backend)
        before = [x[order] for x in before]
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    assert [x.data_ptr() for x in tensors] == places


def test_what_the_kernel_does_not_serve() -> None:
    odd, many = torch.arange(6, dtype=torch.int8).view(2, 3), torch.arange(MOST_ROWS + 1)
    ops.select_rows([odd], [1, 1])
    assert odd.tolist() == [[3, 4, 5]] * 2
    ops.select_rows([many], list(range(MOST_ROWS, -1, -1)))
    assert many[0] == MOST_ROWS
    ops.select_rows([], [0])
