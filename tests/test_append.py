"""The open buffer: new tokens join it as the quantizer makes them, and whole blocks leave it as `seal_blocks` does."""

from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_one_test, in_turn
from append_support import GROUPS, cache, copy, expected, full_store, snapshot
from choices import BACKENDS
from op_calls import append_step, append_tokens, quantize_tokens, seal_blocks, seal_open
from stores import make_store, tokens

from turbo_hf.layout import HeadGroups, KVStore, empty_pages
from turbo_hf.ops.maths import balanced_keys, balanced_queries

pytestmark = pytest.mark.usefixtures("poison")


@all_pairs(
    dim=[pytest.param(d, id=f"d{d}") for d in (16, 80)],
    dtype=[torch.float16, torch.float32],
    brought=[
        pytest.param((1, None), id="one"),
        pytest.param((5, None), id="several"),
        pytest.param((5, [0, 3, 5]), id="ragged"),
        pytest.param((130, None), id="prompt"),
        pytest.param((130, [0, 33, 130]), id="ragged_prompt"),
    ],
    given=[pytest.param(False, id="own_scale"), pytest.param(True, id="given_scale")],
    backend=BACKENDS,
)
def test_stores_what_the_quantizer_makes(
    dim: int, dtype: torch.dtype, brought: tuple[int, list[int] | None], given: bool, backend: str, device: torch.device
) -> None:
    m, starts = brought
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


@in_turn(dim=[pytest.param(d, id=f"d{d}") for d in (16, 48, 64, 80)], dtype=[torch.bfloat16, torch.float32])
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
        out = append_tokens(k, v, got, nonfinite=flags[0], balance=balance, queries=q, backend=backend)
        append_tokens(divided, v, want, nonfinite=flags[0], backend="reference")
        assert_same_tokens(got, want)
        assert out is not None
        assert torch.equal(out, balanced_queries(q, balance))
    got = full_store(dim, ((4, 2),), device)
    want, k, v = snapshot(got), k[:, :, :1], v[:, :, :1]
    q = q[:, :, :1]
    out = append_step(k, v, got, nonfinite=flags[0], arrived=flags[1], balance=balance, queries=q, backend=backend)
    assert out is not None
    assert torch.equal(out, balanced_queries(q, balance))
    append_step(divided[:, :, :1], v, want, nonfinite=flags[0], arrived=flags[1], backend="reference")
    assert_same_tokens(got, want)
    assert not flags[0].item()


def assert_same_tokens(got: KVStore, want: KVStore) -> None:
    """The open tokens of two stores, bit for bit."""
    assert torch.equal(got.open_len, want.open_len)
    for row, held in enumerate(want.open_len.tolist()):
        for name in ("k_open", "k_scale", "v_scale"):
            assert torch.equal(getattr(got, name)[row, :, :held], getattr(want, name)[row, :, :held]), name
        assert torch.equal(got.v_open[row, ..., :held], want.v_open[row, ..., :held])


@all_pairs(which=[pytest.param(0, id="k"), pytest.param(1, id="v")], bad=[float("nan"), float("inf")], backend=BACKENDS)
def test_nan_and_inf_are_reported(which: int, bad: float, backend: str, device: torch.device) -> None:
    store, nonfinite = cache([3], 16, device, torch.float32), torch.zeros(1, dtype=torch.int32, device=device)
    new = [tokens(1, 2, 2, 16, device=device) for _ in range(2)]
    append_tokens(new[0], new[1], store, nonfinite=nonfinite, backend=backend)
    assert not nonfinite.item()
    new[which][0, 1, 1, 3] = bad
    append_tokens(new[0], new[1], store, nonfinite=nonfinite, backend=backend)
    assert nonfinite.item()


@pytest.mark.parametrize("m", [3, 70])
def test_the_span_grows_to_the_largest_scales(m: int, backend: str, device: torch.device) -> None:
    store = cache([3, 5], 16, device, torch.float32, room=m)
    nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
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


@in_turn(groups=[*GROUPS, *FULL_GROUPS], dim=[pytest.param(d, id=f"d{d}") for d in (80, 16)])
def test_whole_blocks_go_to_the_pages_that_the_table_names(
    groups: HeadGroups, dim: int, backend: str, device: torch.device
) -> None:
    """Rows that seal two blocks, one behind others, none, and one of two because the first has left the window."""
    lengths, counted = [140, 70, 20, 150], [2, 3, 0, 1]
    k, v = (tokens(4, 2, 150, dim, dtype=torch.float16, device=device) for _ in range(2))
    order = torch.tensor([[1, 0], [0, 1], [1, 0], [1, 0]], device=device)
    store = make_store(k, v, lengths, groups=groups, order=order, sealed=[0, 0, 0, 0])
    paged = tuple(empty_pages(width, 9, n, dim, 64, device, torch.float16) for width, n in groups)
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
            want = seal_blocks(key, key_scale, value, value_scale, got.width, "reference")
            for name in ("k", "v", "meta", "size"):
                assert torch.equal(getattr(got, name)[page], getattr(want, name)[0]), name
        for x in got[1:]:
            assert (x[[0, 1, 3, 5, 7]] == 7).all()
        slot += got.k.shape[1]


def test_refuses_other_shapes() -> None:
    store = cache([3], 16, torch.device("cpu"), torch.float32)
    k = torch.zeros(1, 2, 1, 16)
    with pytest.raises(ValueError, match=r"v must be \[1, 2, M, 16\] like the store; got \(1, 2, 1, 32\)"):
        append_tokens(k, torch.zeros(1, 2, 1, 32), store, nonfinite=torch.zeros(1, dtype=torch.int32))


@in_one_test(
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
    with pytest.raises(ValueError, match=f"k brings {room + 1} tokens per row; the store has room for {room}"):
        append_tokens(k, k, store, nonfinite=torch.zeros(1, dtype=torch.int32))


def test_more_pairs_than_a_launch_takes_are_refused(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    launch_store = pytest.importorskip("turbo_hf.ops.store.launch")
    monkeypatch.setattr(launch_store, "MOST_PAIRS", 5)
    with pytest.raises(ValueError, match="3 rows of 2 KV heads are more than the 5 pairs that a launch takes"):
        quantize_tokens(torch.randn(3, 2, 8, 16, device=device), backend="triton")
    assert quantize_tokens(torch.randn(2, 2, 8, 16, device=device), backend="triton")[0].shape == (2, 2, 8, 16)
