"""`prefill` against the float64 oracle: prompts, chunks over a past, numbers of any size; the same; refusals."""

from itertools import permutations
from typing import Any

import pytest
import torch
from budgets import check_same, largest
from choices import DTYPES, MODES
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import prefill
from prefill_support import check_prefill, inputs, random_past
from stores import make_store

from turbo_hf.config.turbo_config import ATTENTION_MODES
from turbo_hf.layout import BITS, SCORE_LIMIT
from turbo_hf.ops import reference_flash as flash

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    q, k, v = inputs(1, 70, device, dtype=dtype)
    check_prefill(q, k, v, mode, sinks=True)
    check_prefill(q, k, v, mode, past=random_past([100], k))


@pytest.mark.parametrize("mode", MODES)
def test_scaling_is_the_models(mode: str, device: torch.device) -> None:
    check_prefill(*inputs(1, 65, device), mode, scaling=0.03)


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_neither_read_nor_written(mode: str, device: torch.device) -> None:
    """Rows of one token, of none, of all; what lies under padding may be anything."""
    q, k, v = inputs(5, 70, device)
    starts = [0, 69, 70, 6, 33]
    for x in (q, k, v):
        for row, start in enumerate(starts):
            x[row, :, :start] = torch.nan
    got = check_prefill(q, k, v, mode, starts=starts, sinks=True)
    assert bool(got.lse[2].isneginf().all())
    assert not got.out[2].any()


@pytest.mark.parametrize("mode", MODES)
def test_strides_do_not_matter(mode: str, device: torch.device) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(2, 65, device))
    got = check_prefill(q, k, v, mode)
    plain = prefill(q.contiguous(), k.contiguous(), v.contiguous(), scaling=0.125, mode=mode)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e2, 3e2, 1e3, 1e4, 1e6])
def test_scores_of_any_size(size: float, mode: str, device: torch.device) -> None:
    """One key takes all of P, or all keys the same share, without a NaN and with lse as large as the scores.

    Scores of which INT8 tells nothing are not left to it.
    """
    q, k, v = inputs(1, 130, device)
    options: dict[str, Any] = {"scaling": 1.0, "sinks": torch.zeros(4, device=device), "past": random_past([70], k)}
    if size < 1e3:
        check_prefill(size * q, k, v, mode, scaling=1.0)
        check_prefill(size * q, k, v, mode, **options)
        return
    if device.type == "cuda":
        # what is computed again there reads the past as it was unpacked, in INT8
        options["past"] = None
    exact = check_prefill(size * q, k, v, "native", **options)
    out = prefill(size * q, k, v, mode=mode, **options)
    wild = (exact.lse.abs() > SCORE_LIMIT).any(-1)
    # at 1e3 some heads pass the limit, beyond it all do
    assert wild.any()
    assert wild.all() or size == 1e3
    for got, want in zip(out, exact, strict=True):
        assert torch.equal(got[wild], want[wild])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-43])
def test_blocks_of_zeros(size: float, mode: str, device: torch.device) -> None:
    """Scales of 0 must not divide anything; numbers of which a scale has no finite reciprocal count as 0."""
    q, k, v = inputs(1, 150, device)
    for part in (k[:, :, :64], v[:, :, 64:128], q[:, :, 128:]):
        part.mul_(size)
    check_prefill(q, k, v, mode, block=64)


@pytest.mark.parametrize("mode", MODES)
def test_one_huge_value(mode: str, device: torch.device) -> None:
    """An outlier costs its own block its precision, as the budget knows, and no other block."""
    q, k, v = inputs(1, 130, device)
    k[0, 0, 70, 3], v[0, 1, 70, 3] = 1e4, -1e4
    check_prefill(q, k, v, mode)


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
    }
    lengths = [data.draw(st.integers(0, 150), "past") for _ in starts]
    low = data.draw(st.integers(0, kv_heads), "low")
    every = st.sampled_from((*BITS, *permutations(BITS, 2)))
    widths = (data.draw(every), data.draw(every))
    groups = tuple((bits, n) for bits, n in zip(widths, (kv_heads - low, low), strict=True) if n)
    order = torch.tensor([data.draw(st.permutations(range(kv_heads)), "order") for _ in starts])
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    q, k, v = inputs(len(starts), m, torch.device("cpu"), heads=kv_heads * group, kv_heads=kv_heads, dim=dim)
    past = None
    if data.draw(st.booleans(), "has past"):
        old = data.draw(st.sampled_from((32, 64, 128)), "block of the past")
        # while tokens may still be taken back, whole blocks stay open
        opened = data.draw(st.booleans(), "open blocks")
        sealed = [data.draw(st.integers(0, n // old), "sealed") for n in lengths] if opened else None
        past = random_past(lengths, k, groups=groups, order=order, block=old, sealed=sealed)
    mode = data.draw(st.sampled_from(ATTENTION_MODES), "mode")
    check_prefill(q, k, v, mode, past=past, starts=starts, block=block, **options)


@pytest.mark.parametrize("mode", MODES)
def test_query_tiles_do_not_change_the_result(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over query tiles bounds memory; a tile also leaves out the keys behind it."""
    q, k, v = inputs(3, 150, torch.device("cpu"))
    options: dict[str, Any] = {"scaling": 0.125, "mode": mode, "window": 90}
    options |= {"past": random_past([100, 0, 64], k), "starts": torch.tensor([0, 20, 149])}
    whole = prefill(q, k, v, **options)
    # 3 rows x 4 heads x (128 past + 192 new) keys: 7 queries at a time
    monkeypatch.setitem(flash.TILE_ELEMENTS, "cpu", 7 * 3 * 4 * 320)
    check_same(prefill(q, k, v, **options), whole, largest(v))


X = torch.zeros(1, 2, 4, 16)
FLOAT = "must be float16, bfloat16, float32 or float64; got torch.int8"
RANK = r"must be \[B, H, M, D\]; got shape \(2, 4, 16\)"
QUERY = r"q must be \[B, Hq, M, 16\] with Hq a multiple of 2; got \(1, "
LIKE_Q = r"must be torch.float32 \[1, [12], 4, 16\] on cpu; got"
PAST = r"past.k_open must be \[1, 2, cap, 16\] on cpu; got "


def past(*shape: int) -> dict[str, Any]:
    return {"past": make_store(torch.zeros(shape), torch.zeros(shape), [4] * shape[0])}


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: X.to(torch.int8)}, f"{name} {FLOAT}") for name in "qk"),
    *(({name: X[0]}, f"{name} {RANK}") for name in "qk"),
    (dict.fromkeys("qkv", torch.zeros(1, 2, 4, 24)), "k has head dim 24; packed blocks need a multiple of 16"),
    ({"q": torch.zeros(1, 3, 4, 16)}, QUERY),
    ({"q": torch.zeros(1, 2, 4, 32)}, QUERY),
    ({"k": torch.zeros(2, 2, 4, 16)}, f"k {LIKE_Q}"),
    ({"k": torch.zeros(1, 2, 5, 16)}, f"k {LIKE_Q}"),
    ({"v": torch.zeros(1, 1, 4, 16)}, f"v {LIKE_Q}"),
    ({"v": torch.zeros(1, 2, 4, 32)}, f"v {LIKE_Q}"),
    *(({name: X.half()}, f"{name} {LIKE_Q} torch.float16") for name in "kv"),
    *(({name: X.to("meta")}, f"{name} {LIKE_Q} .* on meta") for name in "kv"),
    (past(2, 2, 4, 16), PAST),
    (past(1, 1, 4, 16), PAST),
    (past(1, 2, 4, 32), PAST),
    ({"block": 16}, "block must be one of 32, 64, 128 tokens; got 16"),
    ({"sinks": torch.zeros(3)}, r"sinks must be \[Hq\] = \[2\]; got \(3,\)"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill(**{"q": X, "k": X, "v": X, "scaling": 1.0, **given})
