"""`decode` against the float64 oracle over the very integers that the cache holds; what is the same; refusals."""

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from budgets import QUERY_MAX, SLACK, check, check_exact, check_same, check_turbo, largest
from choices import FLOATS, OPTIONS, TWO_MODES
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import decode, prefill
from prefill_support import step_queries
from stores import make_store, random_store, store_codes, tokens, unpack

from turbo_hf.layout import BITS, UNQUANTIZED, AttentionOutput, HeadGroups, KVStore


def check_decode(
    q: torch.Tensor, store: KVStore, mode: str, backend: str, *, starts: Sequence[int] | None = None, **options: Any
) -> AttentionOutput:
    """Assert that `decode` is right in `mode`, and return it. sinks=True stands for random ones."""
    if options.get("sinks") is True:
        options["sinks"] = torch.randn(q.shape[1], device=q.device) * 3
    options.setdefault("scaling", q.shape[-1] ** -0.5)
    first = None if starts is None else torch.tensor(starts, device=q.device)
    got = decode(q, store, starts=first, mode=mode, backend=backend, **options)
    rows = store_codes(store)
    if mode == "native":
        check_exact(got, q, [row.values() for row in rows], starts=starts, **options)
    else:
        fused = q.device.type == "cuda" or backend != "triton"
        fake = step_queries(q, starts or [0] * len(q), fused=fused)
        check_turbo(got, fake, q.dtype, rows, starts=starts, **options)
    return got


pytestmark = pytest.mark.usefixtures("poison")

EVERY = (*BITS, *permutations(BITS, 2))
"""Each width that codes have."""
NOTHING = [pytest.param(size, id=f"{size:g}") for size in (0.0, 1e-30, 1e-37, 1e-43)]
RAGGED = [130, 1, 64, 63, 65]


CASES: dict[str, tuple[list[int], tuple[int, int], int, dict[str, Any]]] = {
    # lengths, (query heads, KV heads), new tokens, what the store is made of
    "gqa1:1": (RAGGED, (2, 2), 1, {}),
    "gqa4:1": (RAGGED, (8, 2), 1, {}),
    "gqa7:1": (RAGGED, (14, 2), 1, {}),
    "mqa": (RAGGED, (4, 1), 1, {}),
    "one-row": ([130], (4, 1), 1, {}),
    "one-token": ([1], (4, 1), 1, {}),
    "whole-blocks": ([127, 128], (4, 1), 1, {}),
    # drafts: the last tokens see only what stands before them, across a block's edge too
    "2-new": ([130, 16, 64, 70], (4, 2), 2, {}),
    "5-new": ([130, 16, 64, 70], (4, 2), 5, {}),
    "16-new": ([130, 16, 64, 70], (4, 2), 16, {}),
    "blocks-of-32": ([300, 140], (4, 2), 3, {"block": 32}),
    "blocks-of-128": ([300, 140], (4, 2), 3, {"block": 128}),
    # while tokens may still be taken back, whole blocks stay open
    "open-blocks": ([300, 140], (4, 2), 3, {"block": 64, "sealed": [0, 1]}),
    "open-blocks-of-128": ([300, 140], (4, 2), 3, {"block": 128, "sealed": [0, 1]}),
    "4+2": ([130, 64, 90], (8, 4), 2, {"groups": ((4, 2), (2, 2))}),
    "8+3": ([130, 64, 90], (8, 4), 2, {"groups": ((8, 1), (3, 3))}),
    "8+4+3+2": ([130, 64, 90], (8, 4), 2, {"groups": ((8, 1), (4, 1), (3, 1), (2, 1))}),
    "4/2+8/3+3/2": ([130, 64, 90], (8, 4), 2, {"groups": (((4, 2), 2), ((8, 3), 1), ((3, 2), 1))}),
    "2/8+2/3+3/4": ([130, 64, 90], (8, 4), 2, {"groups": (((2, 8), 1), ((2, 3), 1), ((3, 4), 2))}),
}


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, mode: str, device: torch.device, backend: str) -> None:
    """Heads in any order, in which those of several widths stand."""
    lengths, (heads, kv_heads), new, how = CASES[case]
    order = torch.rand(len(lengths), kv_heads).argsort(-1)
    store = random_store(lengths, kv_heads, 64, device, order=order, **how)
    window = 150 if "block" in how else None
    check_decode(tokens(len(lengths), heads, new, 64, device=device), store, mode, backend, window=window)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dim", "mode"),
    [
        *((16, "turbo"), (48, "native"), (64, "turbo"), (80, "native"), (96, "turbo"), (128, "native")),
        *((128, "turbo"), (512, "turbo")),
    ],
)
def test_head_dims_and_bits(dim: int, bits: int, mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 63], 2, dim, device, groups=((bits, 2),))
    check_decode(tokens(2, 4, 2, dim, device=device), store, mode, backend, starts=[0, 1])


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: dict[str, Any], mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 4, 64, 63, 65], 2, 64, device, groups=((4, 1), (2, 1)))
    check_decode(tokens(5, 4, 3, 64, device=device), store, mode, backend, **options)


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
        for backend in ("reference", "triton")
        for dtype in FLOATS
        # it has no kernel
        if (backend, dtype) != ("triton", torch.float64)
    ],
)
def test_dtypes(backend: str, dtype: torch.dtype, mode: str, device: torch.device) -> None:
    store = random_store([130, 65], 2, 64, device, dtype=dtype)
    check_decode(tokens(2, 4, 2, 64, dtype=dtype, device=device), store, mode, backend, sinks=True)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_padding_is_neither_read_nor_written(mode: str, device: torch.device, backend: str) -> None:
    """Rows that bring fewer tokens than others, one that brings none, one that holds none at all."""
    q, starts = tokens(4, 4, 5, 64, device=device), [0, 3, 5, 5]
    for row, start in enumerate(starts):
        q[row, :, :start] = torch.nan
    got = check_decode(q, random_store([130, 2, 70, 0], 2, 64, device), mode, backend, starts=starts, sinks=True)
    assert bool(got.lse[2:].isneginf().all())
    assert not got.out[2:].any()


@pytest.mark.parametrize("mode", TWO_MODES)
def test_strides_of_q_do_not_matter(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([130, 65], 2, 64, device)
    q = tokens(2, 3, 4, 64, device=device).transpose(1, 2)
    got = check_decode(q, store, mode, backend)
    for a, b in zip(got, decode(q.contiguous(), store, scaling=0.125, mode=mode, backend=backend), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e3, 1e6])
def test_scores_of_any_size(size: float, mode: str, device: torch.device, backend: str) -> None:
    """One key takes all of P, or all keys the same share, without a NaN and with lse as large as the scores."""
    store = random_store([130, 65], 2, 64, device, groups=((8, 1), (4, 1)))
    q = tokens(2, 4, 2, 64, device=device)
    check_decode(size * q, store, mode, backend, scaling=1.0, sinks=torch.zeros(4, device=device))
    check_decode(size * q, store, mode, backend, scaling=1.0)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_sink_above_all_scores_takes_all(mode: str, device: torch.device, backend: str) -> None:
    store = random_store([70], 2, 64, device)
    got = check_decode(
        tokens(1, 2, 1, 64, device=device), store, mode, backend, sinks=torch.full((2,), 200.0, device=device)
    )
    assert bool((got.lse == 200).all())
    assert largest(got.out) < torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("size", NOTHING)
def test_blocks_of_zeros(size: float, mode: str, device: torch.device, backend: str) -> None:
    """Scales of 0 must not divide anything; numbers of which a scale has no finite reciprocal count as 0."""
    k, v = tokens(1, 2, 150, 16, device=device), tokens(1, 2, 150, 16, device=device)
    for part in (k[:, :, :64], v[:, :, 64:128], k[:, :, 140:], v[:, :, 130:]):
        part.mul_(size)
    q = tokens(1, 4, 3, 16, device=device)
    check_decode(q, make_store(k, v, [150]), mode, backend)
    check_decode(size * q, make_store(k, v, [150]), mode, backend)
    check_decode(q, make_store(size * k, size * v, [150]), mode, backend)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_token_of_zeros_takes_almost_all(mode: str, device: torch.device, backend: str) -> None:
    """What is left for the others is too little to be divided by."""
    k, v, q = (tokens(1, 1, n, 16, device=device) for n in (70, 70, 1))
    k[:, :, 5], v[:, :, 5] = q[:, :, 0] * (88 / q.square().sum()), 0
    k = k - (k * q).sum(-1, keepdim=True) * q / q.square().sum() * (torch.arange(70, device=device) != 5)[:, None]
    check_decode(q, make_store(k, v, [70]), mode, backend, scaling=1.0)


@settings(max_examples=150)
@given(data=st.data())
def test_any_decode(data: st.DataObject) -> None:
    any_decode(data, "reference", torch.device("cpu"))


@settings(max_examples=16)
@given(data=st.data(), mode=st.sampled_from(("native", "turbo")))
def test_any_decode_by_the_kernel(data: st.DataObject, mode: str, device: torch.device) -> None:
    any_decode(data, "triton", device, (mode,))


def any_decode(
    data: st.DataObject, backend: str, device: torch.device, modes: tuple[str, ...] = ("native", "turbo")
) -> None:
    """Any shape, lengths, widths, options: right in all these modes."""
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.integers(1, 4), "group")
    block, dim = data.draw(st.sampled_from((32, 64)), "block"), data.draw(st.sampled_from((16, 32, 48)), "dim")
    m = data.draw(st.integers(1, 16), "m")
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3), "lengths")
    new = [data.draw(st.integers(0, min(m, n)), "new") for n in lengths]
    sealed = [data.draw(st.integers(0, n // block), "sealed") for n in lengths]
    low = data.draw(st.integers(0, kv_heads), "low")
    widths = (data.draw(st.sampled_from(EVERY)), data.draw(st.sampled_from(EVERY)))
    groups = tuple((bits, n) for bits, n in zip(widths, (kv_heads - low, low), strict=True) if n)
    order = torch.tensor([data.draw(st.permutations(range(kv_heads)), "order") for _ in lengths])
    options = {
        "window": data.draw(st.none() | st.integers(1, 160), "window"),
        "softcap": data.draw(st.none() | st.sampled_from((1.0, 30.0)), "softcap"),
        "sinks": data.draw(st.none() | st.just(True), "sinks"),
    }
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    store = random_store(lengths, kv_heads, dim, device, groups=groups, order=order, block=block, sealed=sealed)
    q = tokens(len(lengths), kv_heads * group, m, dim, device=device)
    for mode in modes:
        check_decode(q, store, mode, backend, starts=[m - n for n in new], **options)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_query_with_nan_gives_nan(mode: str, device: torch.device, backend: str) -> None:
    store, q = random_store([130, 70], 2, 64, device), tokens(2, 4, 1, 64, device=device)
    q[0, 1, 0, 3] = torch.nan
    got = decode(q, store, scaling=0.125, mode=mode, backend=backend)
    assert bool(got.out[0, 1].isnan().all())
    assert bool(got.out[1].isfinite().all())
    assert bool(got.out[0, 2:].isfinite().all())


@pytest.mark.parametrize("sealed", [True, False])
def test_a_value_with_nan_gives_nan(sealed: bool, device: torch.device, backend: str) -> None:
    """Of one head: a maximum that skips NaN would leave the value out."""
    store, q = random_store([130, 70], 2, 64, device), tokens(2, 4, 1, 64, device=device)
    sizes = store.paged[0].size[store.table[0, 0], :, 1] if sealed else store.v_scale[0]
    sizes[1, 1] = torch.nan
    got = decode(q, store, scaling=0.125, backend=backend)
    assert bool(got.out[0, 2:].isnan().all())
    assert bool(got.out[0, :2].isfinite().all())
    assert bool(got.out[1].isfinite().all())


def test_a_cache_without_a_token(backend: str) -> None:
    store = make_store(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16), [0, 0])
    got = decode(torch.randn(2, 4, 1, 16), store, scaling=0.25, sinks=torch.zeros(4), backend=backend)
    assert not got.out.any()
    assert bool(got.lse.isneginf().all())


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_widest_ranges_overflow_nothing(bits: int, mode: str, device: torch.device, backend: str) -> None:
    """The widest spans that a page can hold, times the largest codes of queries: all numbers of a token are as large as
    its largest."""
    sizes = 0.5 + torch.rand(1, 2, 130, 1, device=device)
    k, v = (tokens(1, 2, 130, 128, device=device).sign() * sizes for _ in range(2))
    store = make_store(k, v, [130], groups=((bits, 2),))
    # sealing leaves out the ends of ranges
    store.paged[0].meta[:, :, ::2], store.paged[0].meta[:, :, 1::2] = -127, 254 - 256
    check_decode(tokens(1, 4, 2, 128, device=device).sign(), store, mode, backend)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_queries_times_spans_are_rounded_as_said(bits: int, device: torch.device) -> None:
    """By the kernel: queries that are their own codes; products with spans and zeros in units of 256, halves up."""
    pytest.importorskip("triton")
    store, levels = random_store([150], 1, 64, device, groups=((bits, 1),)), 2**bits - 1
    q = torch.randint(-QUERY_MAX, QUERY_MAX + 1, (2, 64))
    q[:, 0] = QUERY_MAX
    got = decode(q.float().view(1, 2, 1, 64).to(device), store, scaling=1e-4, backend="triton")
    pages, count = store.paged[0], int(store.open_len)
    opened, scale = (x[0, 0, :count].cpu() for x in (store.k_open, store.k_scale))
    scores = [q @ opened.long().T * scale.double()]
    for page in store.table[0].tolist():
        keys, zero, span = unpack(pages.k[page, 0], bits), *pages.meta[page, 0, :2].long().cpu()
        whole = (q * (span % 256) + 128 >> 8) @ keys.T + (levels * (q @ zero) + 128 >> 8)[:, None]
        scores.append(whole * pages.size[page, 0, 0].double().cpu() * 256 / levels)
    want = torch.cat(scores, 1).mul(1e-4).logsumexp(1)
    check("lse", got.lse[0, :, 0], want, SLACK * torch.finfo(torch.float32).eps * (1 + largest(want)))


def test_a_row_shorter_than_the_queries(backend: str) -> None:
    store = make_store(torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16), [2, 5])
    q, sinks = torch.randn(2, 2, 4, 16), torch.zeros(2)
    expected = decode(q, store, scaling=0.25, sinks=sinks, starts=torch.tensor([2, 0]), backend=backend)
    found = decode(q, store, scaling=0.25, sinks=sinks, backend=backend)
    assert torch.equal(found.lse, expected.lse)
    assert torch.equal(found.out, expected.out)
    assert found.lse[0, :, :2].eq(-torch.inf).all()


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("sms", [1, 3, 132])
def test_a_plan_for_any_gpu_gives_the_same(
    sms: int, mode: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A plan made for another GPU covers every tile once, and so differs in the order of float32 sums alone."""
    pytest.importorskip("triton")
    from turbo_hf.ops import gpu  # noqa: PLC0415 - needs Triton
    from turbo_hf.ops.decode import launch as launch_decode  # noqa: PLC0415 - needs Triton

    k, v = tokens(2, 2, 230, 64, device=device), tokens(2, 2, 230, 64, device=device)
    store, q = make_store(k, v, [230, 90], groups=((4, 1), (2, 1)), block=32), tokens(2, 4, 1, 64, device=device)
    own = decode(q, store, scaling=0.125, mode=mode, backend="triton")
    launch_decode._workspace.cache_clear()
    monkeypatch.setattr(gpu, "sms", lambda device: sms)
    check_same(decode(q, store, scaling=0.125, mode=mode, backend="triton"), own, largest(v))
    launch_decode._workspace.cache_clear()


def test_many_parts_are_merged_in_groups(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """One head of a long row, which 40 CTAs share; then once more, by the same counters."""
    pytest.importorskip("triton")
    from turbo_hf.ops import gpu  # noqa: PLC0415 - as above
    from turbo_hf.ops.decode import kernel_block  # noqa: PLC0415 - as above
    from turbo_hf.ops.decode import launch as launch_decode  # noqa: PLC0415 - as above

    k, v = (tokens(1, 1, 5050, 32, device=device) for _ in range(2))
    store, q = make_store(k, v, [5050], block=32), tokens(1, 2, 1, 32, device=device)
    parts, planned = [], launch_decode._plan

    def noted(*given: Any) -> Any:
        plan = planned(*given)
        parts.append(plan.parts)
        return plan

    monkeypatch.setattr(launch_decode, "_plan", noted)
    found = []
    for sms in (1, 132, 132):
        monkeypatch.setattr(gpu, "sms", lambda device, sms=sms: sms)
        found.append(decode(q, store, scaling=0.2, backend="triton"))
    assert parts[0] <= kernel_block.ONE_LEVEL.value < parts[-1]
    check_same(found[1], found[0], largest(v))
    assert torch.equal(found[2].out, found[1].out)
    assert torch.equal(found[2].lse, found[1].lse)


def test_launches_that_are_replayed_keep_their_workspace(device: torch.device) -> None:
    pytest.importorskip("triton")
    from turbo_hf.ops.decode import launch as launch_decode  # noqa: PLC0415 - needs Triton

    k, v = tokens(2, 1, 400, 64, device=device), tokens(2, 1, 400, 64, device=device)
    plans: dict[Any, Any] = {}
    store, q = make_store(k, v, [400, 90], block=32)._replace(plans=plans), tokens(2, 4, 1, 64, device=device)
    want = decode(q, store, scaling=0.125, backend="triton")
    (made,) = plans.values()
    # others have come between, and theirs is the one that is remembered
    launch_decode._workspace.cache_clear()
    got = decode(q, store, scaling=0.125, backend="triton")
    assert torch.equal(got.out, want.out)
    assert list(plans.values()) == [made]
    assert launch_decode._workspace.cache_info().currsize == 0


def test_a_steady_plan_follows_its_rows_in_place(device: torch.device) -> None:
    """Also for rows without a token, and when one row is much longer than the rest."""
    pytest.importorskip("triton")
    from turbo_hf.ops.decode.stream_k import SteadyPlans  # noqa: PLC0415 - as above

    plans = SteadyPlans()
    address, k, v = set(), tokens(3, 2, 700, 64, device=device), tokens(3, 2, 700, 64, device=device)
    for lengths in ([40, 64, 3], [90, 41, 0], [700, 42, 0]):
        store, q = make_store(k, v, lengths, block=32), tokens(3, 4, 1, 64, device=device)
        starts = torch.tensor([int(n == 0) for n in lengths], device=device)
        want = decode(q, store, scaling=0.125, starts=starts, backend="triton")
        for plan in plans.values():
            plan.update(store.sealed.tolist())
        got = decode(q, store._replace(plans=plans), scaling=0.125, starts=starts, backend="triton")
        check_same(got, want, largest(v))
        (made,) = plans.values()
        address.add(made.words.data_ptr())
    assert len(address) == 1


def test_blocks_that_do_not_fit_in_float32_are_refused(device: torch.device) -> None:
    store, q = random_store([3], 1, 128, device, block=128), torch.randn(1, 1, 1, 128, device=device)
    with pytest.raises(ValueError, match="blocks of 128 tokens of 128 channels do not fit in float32"):
        decode(q, store, scaling=1.0, mode="native", backend="triton")


Q = torch.zeros(1, 2, 1, 16)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(1, 3, 1, 16)}, r"q must be \[B, Hq, M, 16\] with Hq a multiple of 2; got \(1, "),
    ({"q": torch.zeros(2, 2, 1, 16)}, r"q must be \[1, Hq, M, D\] on cpu; got torch.float32 \[2, 2, 1, 16\] on cpu"),
    ({"q": torch.zeros(1, 2, 1, 16, device="meta")}, r"q must be \[1, Hq, M, D\] on cpu; got .* on meta"),
    ({"q": Q.to(torch.int8)}, "q must be float16, bfloat16, float32 or float64; got torch.int8"),
    ({"sinks": torch.zeros(4)}, r"sinks must be \[Hq\] = \[2\]; got \(4,\)"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refuses(given: dict[str, Any], message: str) -> None:
    store = random_store([4], 2, 16, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        decode(**{"q": Q, "scaling": 1.0, **given}, store=store)


def test_a_cap_that_leaves_nothing_to_attend_to() -> None:
    q = torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match="softcap must be above 0"):
        prefill(q, q, q, scaling=1.0, softcap=0.0)
    store = make_store(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), [3])
    with pytest.raises(ValueError, match="softcap must be above 0"):
        decode(q, store, scaling=1.0, softcap=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sealed_host": (2,)}, r"store.sealed_host must hold the numbers in store.sealed, \(1,\); got \(2,\)"),
        ({"sealed": torch.tensor([3])}, r"store.sealed must give 1 rows of 0 to 1 blocks, .*; got \(3,\)"),
        ({"sealed": torch.tensor([1, 1])}, r"store.sealed must be \[1\] on cpu; got torch.int64 \[2\]"),
        ({"open_len": torch.tensor([1, 1])}, r"store.open_len must be \[1\] on cpu; got torch.int64 \[2\]"),
        ({"table": torch.zeros(2, 1, dtype=torch.int64)}, r"store.table must be \[1, blocks\] on cpu; got .* \[2, 1\]"),
    ],
)
def test_refuses_lengths_that_are_not_the_caches(change: dict[str, Any], message: str) -> None:
    store = random_store([70], 2, 16, torch.device("cpu"))._replace(**change)
    with pytest.raises(ValueError, match=message):
        decode(torch.zeros(1, 2, 1, 16), store, scaling=1.0)


DRAWS = 50
"""Caches of each kind."""

Kind = tuple[int, int, int, int, HeadGroups, torch.dtype, dict[str, Any]]
KINDS: list[Kind] = [
    # head dim, query heads a KV head, new tokens, block, (width, heads) of each width, type, options
    (128, 4, 1, 64, ((4, 2),), torch.float16, {}),
    (64, 7, 1, 64, ((4, 2),), torch.bfloat16, {}),
    (128, 1, 16, 64, ((4, 1), (2, 1)), torch.float16, {}),
    (64, 3, 5, 32, ((3, 2),), torch.float16, {"window": 90}),
    (128, 8, 2, 128, ((8, 1), (2, 1)), torch.float16, {"softcap": 4.0}),
    (80, 4, 1, 64, ((8, 1), (4, 1), (3, 1), (2, 1)), torch.float16, {"sinks": True}),
    (64, 2, 3, 64, ((2, 2),), torch.float32, {"window": 130, "softcap": 9.0, "sinks": True}),
    (256, 2, 1, 64, ((4, 1),), torch.float16, {}),
    (128, 4, 1, 64, (((4, 2), 2),), torch.float16, {}),
    (512, 8, 1, 64, ((4, 1),), torch.bfloat16, {}),
    (512, 4, 3, 64, ((8, 1), (3, 1)), torch.bfloat16, {"window": 90, "softcap": 9.0}),
    (80, 3, 2, 64, (((4, 3), 1), ((8, 2), 1), ((2, 8), 1)), torch.bfloat16, {"window": 90}),
    (128, 4, 1, 64, ((UNQUANTIZED, 2),), torch.float16, {}),
    (64, 7, 2, 32, ((UNQUANTIZED, 1),), torch.bfloat16, {"window": 90, "sinks": True}),
]


@pytest.mark.parametrize("mode", ["turbo", "native"])
@pytest.mark.gpu
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_random_caches(kind: int, mode: str) -> None:
    """Rows of 0 to 700 tokens, some without new ones, whole blocks that stay open: all within the oracle's budget."""
    dim, group, m, block, groups, dtype, options = KINDS[kind]
    if dim > 256 and mode == "native":
        pytest.skip("steps in 16 bit have no kernel above 256 channels")
    heads, device, draw = sum(n for _, n in groups), torch.device("cuda"), random.Random(kind)
    for number in range(DRAWS):
        torch.manual_seed(1000 * kind + number)
        lengths = [draw.choice((draw.randint(1, 40), draw.randint(1, 700))) for _ in range(draw.randint(1, 3))]
        starts = [max(0, m - n) if draw.random() < 0.7 else draw.randint(max(0, m - n), m) for n in lengths]
        sealed = [n // block if draw.random() < 0.8 else draw.randint(0, n // block) for n in lengths]
        k, v = (tokens(len(lengths), heads, max(lengths), dim, dtype=dtype, device=device) for _ in range(2))
        order = torch.stack([torch.randperm(heads) for _ in lengths])
        store = make_store(k, v, lengths, groups=groups, order=order, block=block, sealed=sealed)
        q = tokens(len(lengths), group * heads, m, dim, dtype=dtype, device=device)
        own = dict(options)
        if own.get("sinks"):
            own["sinks"] = torch.randn(q.shape[1], device=device) * 3
        own["scaling"] = dim**-0.5
        got = decode(q, store, starts=torch.tensor(starts, device=device), mode=mode, backend="triton", **own)
        rows = store_codes(store)
        if mode == "native" or groups[0][0] == UNQUANTIZED:
            check_exact(got, q, [row.values() for row in rows], starts=starts, **own)
        else:
            check_turbo(got, step_queries(q, starts), q.dtype, rows, starts=starts, **own)
