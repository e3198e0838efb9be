"""Chunks over a compressed past in the kernel for Hopper: the past in tiles of 128, and attention over them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_support import NO_FP8, has_fp8
from op_calls import prefill
from stores import no_past, random_store, store_codes, tokens

from turbo_hf.eval.bench.checked import judge
from turbo_hf.layout import MODES, AttentionOutput, KVStore, in_time_order
from turbo_hf.ops import gpu, tuning
from turbo_hf.ops.prefill import launch
from turbo_hf.ops.prefill.reference import past_operands

pytestmark = pytest.mark.usefixtures("poison")

LENGTHS, SEALED = [330, 128, 0, 64, 37, 192, 200], [4, 0, 0, 1, 0, 3, 1]


@pytest.mark.parametrize("values", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("bits", "dim", "sealed"),
    [(8, 32, None), (4, 64, SEALED), (3, 32, SEALED), (2, 64, None), ((4, 2), 32, None), (8, 64, SEALED)],
)
def test_a_past_in_tiles(
    bits: Any, dim: int, values: torch.dtype, sealed: list[int] | None, device: torch.device
) -> None:
    """Tokens within half a step of their block's INT8, values of FP8 within its rounding."""
    if values != torch.int8 and not has_fp8(device):
        pytest.skip(NO_FP8)
    order = torch.stack([torch.randperm(3) for _ in LENGTHS])
    store = random_store(LENGTHS, 3, dim, device, groups=((bits, 2), (4, 1)), order=order, sealed=sealed)
    for pages in store.paged:
        # a block that is worth little beside the other of its tile, and one that is worth nothing
        pages.size[store.table[0, 0], :, 1] *= 0.01
        pages.size[store.table[0, 3], :, 1] = 0.0
    got = launch.unpack_tiles(store, values)
    for row, codes in enumerate(store_codes(store)):
        length = LENGTHS[row]
        keys, worth = (x[row].double().cpu().repeat_interleave(64, -1) for x in got.scale.unbind(-1))
        whole = -(-length // 128) * 128
        k, v = got.k[row].double().cpu() * keys[..., None], got.v[row].float().double().cpu() * worth.exp2()[:, None]
        v = in_time_order(v).mT
        want_k, want_v = codes.values()
        step = keys[:, :length, None] / 2
        assert ((k[:, :length] - want_k).abs() <= step * (1 + 1e-4)).all()
        if values == torch.int8:
            step = worth[:, :length, None].exp2() / 2
            assert ((v[:, :length] - want_v).abs() <= step * (1 + 1e-4)).all()
        else:
            step = torch.maximum(want_v.abs() / 16, worth[:, :length, None].exp2() * 2.0**-10)
            assert ((v[:, :length] - want_v).abs() <= step * (1 + 1e-5)).all()
        # the steps are the largest number of each block / 127
        for x, steps in ((want_k, keys), (want_v, worth.exp2())) if values == torch.int8 else ((want_k, keys),):
            most = torch.nn.functional.pad(x.abs().amax(-1), (0, -length % 64)).unflatten(-1, (-1, 64)).amax(-1)
            found = steps[:, : most.shape[-1] * 64 : 64] * 127
            torch.testing.assert_close(torch.where(most > 0, found, 0.0), most, rtol=1e-5, atol=0)
        # behind the row's end to the end of its last tile: numbers that count as nothing where they are masked
        assert not got.k[row, :, length:whole].any()
        assert not got.v[row].float()[..., length:whole].any() or length % 64
        assert got.scale[row, :, : whole // 64].isfinite().all()


@pytest.mark.parametrize(
    ("bits", "dim", "block", "mode"),
    [
        (8, 32, 32, "turbo"),
        (8, 48, 64, "native"),
        (4, 48, 64, "half"),
        (4, 32, 32, "native"),
        (3, 32, 64, "turbo"),
        (2, 48, 32, "turbo"),
        (2, 32, 64, "native"),
        ((4, 2), 48, 32, "half"),
        ((8, 3), 32, 64, "native"),
    ],
)
def test_a_past_in_blocks(bits: Any, dim: int, block: int, mode: str, backend: str, device: torch.device) -> None:
    """As above, with values of "half" and all of "native" as they are. A token of NaN makes its block's scale NaN."""
    order = torch.stack([torch.randperm(3) for _ in LENGTHS])
    store = random_store(LENGTHS, 3, dim, device, groups=((bits, 2), (4, 1)), order=order, block=block)
    for pages in store.paged:
        pages.size[store.table[0, 0], :, 1] = 0.0
    for broken in (False, True):
        if broken:
            for pages in store.paged:
                pages.size[store.table[0, 1], :, :, 3] = torch.nan
        wide, half = mode == "native", mode != "turbo"
        if backend == "triton":
            types = (torch.float32 if wide else torch.int8, torch.float32 if half else torch.int8)
            k, v, scale = launch.unpack_past(store, *types, in_time=wide)
            v = v.mT if wide else in_time_order(v).mT
            keys, values = (x.double().repeat_interleave(block, -1) for x in (scale[..., 0], scale[..., 1].exp2()))
        else:
            k, keys, v, values = past_operands(store, MODES[mode], torch.float32)
        for row, codes in enumerate(store_codes(store)):
            split = block * int(store.sealed[row])
            for x, scales, want, exact in zip((k, v), (keys, values), codes.values(), (wide, half), strict=True):
                got, step = x[row, :, :split].double().cpu(), scales[row, :, :split, None].double().cpu()
                # the reference rounds values of "half" to 16 bit
                narrow = 2.0**-8 if mode == "half" and backend == "reference" else 0.0
                off = want[:, :split].abs() * max(narrow, 1e-6) if exact else step / 2
                if row == 0 and broken:
                    assert (got * step)[:, block : 2 * block].isnan().any(-1).any(-1).all()
                    got[:, block : 2 * block], off[:, block : 2 * block] = 0.0, 1.0
                    want[:, block : 2 * block] = 0.0
                    step[:, block : 2 * block] = 1.0
                assert ((got * step - want[:, :split]).abs() <= off * (1 + 1e-4) + 1e-6).all()


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel for Hopper takes chunks of any length; it must have run."""
    if not gpu.hopper(device):
        pytest.skip("needs a Hopper GPU and Triton's Gluon")
    from turbo_hf.ops.prefill import launch_hopper  # noqa: PLC0415 - needs Gluon

    run, runs = launch_hopper.launch_hopper_prefill, list[None]()
    monkeypatch.setattr(launch_hopper, "launch_hopper_prefill", lambda *given: runs.append(run(*given)))
    monkeypatch.setattr(tuning, "LEAST_ITEMS", 0.0)
    yield
    assert runs


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: KVStore | None, starts: list[int], scaling: float
) -> AttentionOutput:
    """Causal attention over what the past holds and over the chunk, in float64; 0 and -inf at padding."""
    m, group, found = q.shape[2], q.shape[1] // k.shape[1], []
    held = [no_past(k.shape[1], k.shape[3])] * len(q) if past is None else store_codes(past)
    for row, (codes, start) in enumerate(zip(held, starts, strict=True)):
        own = zip(codes.values(), (k[row, :, start:], v[row, :, start:]), strict=True)
        keys, values = (torch.cat((x.to(q.device), y.double()), 1).repeat_interleave(group, 0) for x, y in own)
        seen = torch.ones(m - start, keys.shape[1], dtype=torch.bool, device=q.device).tril(keys.shape[1] - m + start)
        score = (q[row, :, start:].double() @ keys.mT * scaling).masked_fill(~seen, -torch.inf)
        out, lse = score.softmax(-1) @ values, score.logsumexp(-1)
        pad = torch.nn.functional.pad
        found.append((pad(out, (0, 0, start, 0)), pad(lse, (start, 0), value=-torch.inf)))
    return AttentionOutput(*map(torch.stack, zip(*found, strict=True)))


def check(got: AttentionOutput, model: AttentionOutput, want: AttentionOutput, starts: list[int]) -> None:
    """`got` is within what `model`, the same mode, is off by; 0 and -inf at padding."""
    for row, start in enumerate(starts):
        assert not got.out[row, :, :start].any()
        assert (got.lse[row, :, :start] == -torch.inf).all()
        if start < got.out.shape[2]:
            parts = (AttentionOutput(x.out[row, :, start:], x.lse[row, :, start:]) for x in (got, got, model, want))
            assert judge(*parts).problem == ""


D64, D128 = (64, torch.float16), (128, torch.bfloat16)


@pytest.mark.parametrize("mode", ["turbo", "fp8"])
@pytest.mark.parametrize(
    ("form", "shape", "pasts", "bits", "sealed", "padding", "share"),
    [
        (D64, (300, 4, 2), [330, 128, 0], 8, None, None, 512),
        (D64, (300, 4, 2), None, 8, None, [0.0, 0.6, 0.1], 512),
        (D64, (128, 2, 2), [64, 37, 1000], 8, None, [1.0, 0.5, 0.0], 64),
        (D64, (17, 7, 1), [70, 70, 70], (4, 2), 0, [1.0, 0.5, 0.0], 64),
        (D64, (17, 7, 1), [64, 37, 1000], 4, None, None, 512),
        (D128, (300, 4, 2), None, (4, 2), None, [1.0, 0.5, 0.0], 512),
        (D128, (300, 4, 2), [64, 37, 1000], (4, 2), 0, [0.0, 0.6, 0.1], 64),
        (D128, (128, 2, 2), [64, 37, 1000], 4, 0, [0.0, 0.6, 0.1], 64),
        (D128, (128, 2, 2), [70, 70, 70], 4, None, None, 512),
        (D128, (17, 7, 1), [330, 128, 0], 8, 0, None, 64),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_attention(
    mode: str, form: tuple[int, torch.dtype], shape: tuple[int, int, int], pasts: list[int] | None, bits: Any,
    sealed: Any, padding: list[float] | None, share: int, device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Over rows of different lengths, within what the mode costs; the same bits from other strides.

    share: tokens of the past that one of several programs reads at least.
    """
    monkeypatch.setattr(tuning, "LEAST_SHARE", share)
    (dim, dtype), (m, heads, kv_heads) = form, shape
    q = tokens(3, heads, m, dim, device=device, dtype=dtype)
    k, v = (tokens(3, kv_heads, m, dim, device=device, dtype=dtype) for _ in range(2))
    starts = [int(m * share) for share in padding or (0, 0, 0)]
    store = None
    if pasts is not None:
        where = None if sealed is None else [max(n // 64 - 2, 0) for n in pasts]
        store = random_store(pasts, kv_heads, dim, device, groups=((bits, kv_heads),), sealed=where)
    options: dict[str, Any] = {"scaling": dim**-0.5, "mode": mode, "past": store}
    options["starts"] = None if padding is None else torch.tensor(starts, device=device)
    got = prefill(q, k, v, **options)
    model = prefill(q, k, v, backend="reference", **options)
    check(got, model, exact(q, k, v, store, starts, dim**-0.5), starts)
    if share < 512:
        return
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    again = prefill(q, k, v, **options)
    assert torch.equal(again.out, got.out)
    assert torch.equal(again.lse, got.lse)


@pytest.mark.usefixtures("hopper")
def test_heads_with_nan_are_computed_again(device: torch.device) -> None:
    """A query of NaN makes its own output NaN, and no other; the rest of its head is computed in 16 bit."""
    q = tokens(2, 4, 140, 128, device=device, dtype=torch.bfloat16)
    k, v = (tokens(2, 2, 140, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    store = random_store([200, 90], 2, 128, device)
    want = prefill(q, k, v, scaling=0.1, mode="turbo", past=store)
    q[1, 3, 50, 0] = torch.nan
    got = prefill(q, k, v, scaling=0.1, mode="turbo", past=store)
    broken = got.out.isnan()
    assert broken[1, 3, 50].all()
    assert int(broken.sum()) == 128
    off = (got.out[1, 3].double() - want.out[1, 3].double()).nan_to_num().norm() / want.out[1, 3].double().norm()
    assert 0 < off < 0.05
    assert torch.equal(got.out[0], want.out[0])
