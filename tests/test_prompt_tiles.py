"""Which key tiles long prompts read, attention over them, and what they drop: reference and kernels by an oracle."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_one_test
from gpu_support import NO_FP8, has_fp8
from op_calls import prefill
from oracle import dropped_mass as exact_dropped_mass
from torch import Tensor

from turbo_hf.eval.bench.check import judge
from turbo_hf.layout import PROMPT_TILE as TILE
from turbo_hf.layout import AttentionOutput, Scoring, TileRule
from turbo_hf.ops.prefill.launch_tiles import launch_list_tiles
from turbo_hf.ops.prefill.reference_tiles import as_square
from turbo_hf.ops.prefill.tiles import check_kept, choose_tiles, density, dropped_mass

pytestmark = pytest.mark.usefixtures("poison")

RULE = TileRule(mass=0.5, peak=0.5, sink_tokens=1, window_tokens=TILE, tail_tokens=3, most_density=1.0)
BARE = RULE._replace(sink_tokens=0, window_tokens=0, tail_tokens=0)
SCALING = 0.2
SCORING = Scoring(SCALING)
MORE = (Scoring(SCALING, softcap=0.7), Scoring(SCALING, sinks=torch.tensor([5.0, -1.0])))
FORMS = ((32, torch.float32), (80, torch.float16))


def inputs(
    tokens: int, device: torch.device, *, dim: int = 32, heads: int = 2, dtype: torch.dtype = torch.float32
) -> Any:
    """q [2, heads, tokens, dim]; k, v of one KV head; keys of a tile are alike, so that shares differ."""
    generator = torch.Generator().manual_seed(tokens + dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tiles = -(-tokens // TILE)
    around = normal(2, 1, tiles, dim).repeat_interleave(TILE, 2)[:, :, :tokens] * 1.5
    q, k, v = normal(2, heads, tokens, dim), normal(2, 1, tokens, dim) + around, normal(2, 1, tokens, dim)
    return tuple(x.to(device, dtype) for x in (q, k, v))


def on(device: torch.device, scoring: Scoring) -> Scoring:
    return scoring if scoring.sinks is None else scoring._replace(sinks=scoring.sinks.to(device))


def capped(score: Tensor, scoring: Scoring) -> Tensor:
    return score if scoring.softcap is None else scoring.softcap * (score / scoring.softcap).tanh()


def random_kept(q: Tensor, share: float = 0.5) -> Tensor:
    tiles = -(-q.shape[2] // TILE)
    drawn = torch.rand(*q.shape[:2], tiles * (tiles - 1) // 2, generator=torch.Generator().manual_seed(1))
    return (drawn < share).to(q.device, torch.uint8)


@all_pairs(
    tokens=(TILE - 1, TILE + 1, 6 * TILE, 6 * TILE + 7),
    form=FORMS,
    rule=(
        RULE,
        BARE,
        BARE._replace(mass=0.9, peak=1.0),
        BARE._replace(mass=1e-6, peak=0.3),
        RULE._replace(mass=1.0),
        BARE._replace(peak=1.0, most_density=0.5),
    ),
    scoring=(SCORING, *MORE),
    backend=("reference", "triton"),
)
def test_choice(
    tokens: int, form: tuple[int, torch.dtype], rule: TileRule, scoring: Scoring, backend: str, device: torch.device
) -> None:
    """Every tile that the rule asks for, in float64, and no other, but where the rounding of float32 decides."""
    dim, dtype = form
    q, k, _ = inputs(tokens, device, dim=dim, dtype=dtype)
    scoring = on(device, scoring)
    kept = choose_tiles(q, k, rule, scoring, backend=backend)
    check_kept(kept, q)
    got, slack = as_square(kept, tokens).cpu(), 1e-3
    whole = tokens // TILE
    means = k[:, 0, : whole * TILE].float().unflatten(1, (whole, TILE)).mean(2)
    for tile in range(1, -(-tokens // TILE)):
        rows = q[:, :, tile * TILE : (tile + 1) * TILE].double()
        score = capped(rows @ means.to(dtype).double()[:, None, :tile].mT * SCALING, scoring) + math.log(TILE)
        total = score.logsumexp(-1, keepdim=True)
        if scoring.sinks is not None:
            total = torch.logaddexp(total, scoring.sinks.double()[:, None, None])
        share = (score - total).exp().cpu()
        mean, most = share.mean(2), share.amax(2)
        ordered = mean.sort(-1, descending=True).values
        cut = ordered.gather(
            -1,
            (ordered.cumsum(-1) < rule.mass * ordered.sum(-1, keepdim=True) - 1e-9)
            .sum(-1, keepdim=True)
            .clamp(max=tile - 1),
        )
        at = torch.arange(tile)
        forced = (at < -(-rule.sink_tokens // TILE)) | (at >= tile - -(-rule.window_tokens // TILE))
        forced |= torch.tensor(tile * TILE + TILE > tokens - rule.tail_tokens)
        surely = forced | (most > rule.peak * (1 + slack)) | (mean > cut * (1 + slack))
        never = ~forced & (most < rule.peak * (1 - slack)) & (mean < cut * (1 - slack))
        # more than so many are all
        most_read = rule.most_density * tile + 1e-4
        surely |= surely.sum(-1, keepdim=True) > most_read
        never &= (~never).sum(-1, keepdim=True) <= most_read
        here = got[:, :, tile, :tile]
        assert here[surely].all()
        assert not here[never].any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rules_of_heads(backend: str, device: torch.device) -> None:
    """Each query head has its own mass and peak."""
    q, k, _ = inputs(6 * TILE + 7, device)
    heads = torch.tensor([[1.0, 1.0], [1e-6, 0.9]], device=device)
    got = choose_tiles(q, k, BARE._replace(heads=heads), SCORING, backend=backend)
    for head, (mass, peak) in enumerate(heads.tolist()):
        want = choose_tiles(q, k, BARE._replace(mass=mass, peak=peak), SCORING, backend=backend)
        assert torch.equal(got[:, head], want[:, head])
    assert not torch.equal(got[:, 0], got[:, 1])
    with pytest.raises(ValueError, match=r"rule.heads must be torch.float32 \[2, 2\]"):
        choose_tiles(q, k, BARE._replace(heads=heads[:1]), SCORING, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_is_not_a_number_is_read(backend: str, device: torch.device) -> None:
    q, k, _ = inputs(5 * TILE, device)
    k[0, 0, TILE] = torch.nan
    kept = as_square(choose_tiles(q, k, BARE._replace(mass=0.3, peak=1.0), SCORING, backend=backend), 5 * TILE)
    # all shares of a query with a score that is no number are none either
    assert kept[0, :, 2:][:, torch.ones(3, 5, device=device).tril(2).bool()].all()
    assert not kept[1, :, 2:][:, torch.ones(3, 5, device=device).tril(2).bool()].all()


@all_pairs(form=FORMS, scoring=(SCORING, *MORE), backend=("reference", "triton"))
def test_dropped_mass(form: tuple[int, torch.dtype], scoring: Scoring, backend: str, device: torch.device) -> None:
    dim, dtype = form
    tokens = 4 * TILE + 9
    q, k, _ = inputs(tokens, device, dim=dim, dtype=dtype)
    kept, places = random_kept(q), torch.arange(0, tokens, 23, device=device)
    scoring = on(device, scoring)
    got = dropped_mass(q, k, kept, places, scoring, backend=backend)
    square = as_square(kept, tokens)
    for row in range(2):
        how: Any = {"softcap": scoring.softcap, "sinks": scoring.sinks}
        want = exact_dropped_mass(q[row], k[row], square[row], places, scaling=SCALING, **how)
        assert want.max() > 0.1
        torch.testing.assert_close(got[row].double(), want, rtol=1e-5, atol=1e-6)


@all_pairs(
    # the general kernel with tiles of 128 keys, and of fewer; on a GPU also what Hopper has a kernel for
    case=(
        ("turbo", 32, torch.float32),
        ("fp16", 32, torch.float32),
        ("half", 128, torch.float16),
        ("turbo", 64, torch.float16),
        ("fp8", 128, torch.float16),
    ),
    backend=("reference", "triton"),
)
def test_attention(case: tuple[str, int, torch.dtype], backend: str, device: torch.device) -> None:
    """Attention over the tiles that are read, as softmax written out in float64, within what the mode itself costs."""
    mode, dim, dtype = case
    if mode == "fp8" and not has_fp8(device):
        pytest.skip(NO_FP8)
    if device.type == "cuda" and (mode, dtype) == ("fp16", torch.float32):
        pytest.skip("prompts in float32 are dense on a GPU")
    tokens = 3 * TILE + 5
    q, k, v = (x[1:] for x in inputs(tokens, device, dim=dim, dtype=dtype))
    kept = random_kept(q, 0.4)
    got = prefill(q, k, v, scaling=SCALING, mode=mode, kept=kept, backend=backend)
    seen = as_square(kept, tokens).repeat_interleave(TILE, 2)[:, :, :tokens].repeat_interleave(TILE, 3)[..., :tokens]
    score = q.double() @ k.double().mT * SCALING
    score = score.masked_fill(~seen.tril(), -torch.inf)
    exact = AttentionOutput(score.softmax(-1) @ v.double(), score.logsumexp(-1))
    model = prefill(q, k, v, scaling=SCALING, mode=mode, kept=kept, backend="reference")
    dense = prefill(q, k, v, scaling=SCALING, mode=mode, backend=backend)
    if backend == "reference":
        # what the mode costs where every key is read
        whole = (q.double() @ k.double().mT * SCALING).masked_fill(~torch.ones_like(seen).tril(), -torch.inf)
        off = (dense.out.double() - whole.softmax(-1) @ v.double()).norm(dim=-1) / exact.out.norm(dim=-1)
        assert ((got.out.double() - exact.out).norm(dim=-1) / exact.out.norm(dim=-1)).max() <= 3 * off.max() + 1e-5
    else:
        assert judge(got, AttentionOutput(got.out.double(), got.lse.double()), model, exact).problem == ""
    assert (dense.out - got.out).abs().max() > 0.05
    every = prefill(q, k, v, scaling=SCALING, mode=mode, kept=torch.ones_like(kept), backend=backend)
    assert torch.equal(every.out, dense.out)
    assert torch.equal(every.lse, dense.lse)


def test_what_a_dropped_tile_holds_is_not_read(device: torch.device) -> None:
    tokens = 3 * TILE
    q, k, v = inputs(tokens, device)
    kept = torch.ones(2, 2, 3, dtype=torch.uint8, device=device)
    # tile 2 does not read tile 1
    kept[..., 2] = 0
    want = prefill(q, k, v, scaling=SCALING, mode="fp16", kept=kept, backend="triton")
    for x in (k, v):
        x[:, :, TILE : 2 * TILE] = torch.nan
    got = prefill(q, k, v, scaling=SCALING, mode="fp16", kept=kept, backend="triton")
    assert torch.equal(got.out[:, :, 2 * TILE :], want.out[:, :, 2 * TILE :])
    assert got.out[:, :, TILE : 2 * TILE].isnan().all()


@all_pairs(
    case=(("turbo", torch.float32), ("fp16", torch.float16)), scoring=(SCORING, *MORE), backend=("reference", "triton")
)
def test_a_padded_row_with_caps_or_sinks_is_the_same_alone(
    case: tuple[str, torch.dtype], scoring: Scoring, backend: str, device: torch.device
) -> None:
    mode, dtype = case
    tokens, start, scoring = 3 * TILE + 5, 140, on(device, scoring)
    q, k, v = inputs(tokens, device, dtype=dtype)
    kept, starts = random_kept(q), torch.tensor([0, start], device=device)
    how: Any = {
        "mode": mode,
        "softcap": scoring.softcap,
        "sinks": scoring.sinks,
        "scaling": SCALING,
        "backend": backend,
    }
    got = prefill(q, k, v, kept=kept, starts=starts, **how)
    rows = [x[1:, :, start:] for x in (q, k, v)]
    tiles = -(-(tokens - start) // TILE)
    own = kept[1:, :, : tiles * (tiles - 1) // 2].contiguous()
    assert not own.all()
    alone = prefill(*rows, kept=own, **how)
    first = prefill(q[:1], k[:1], v[:1], kept=kept[:1], **how)
    # torch's own products of one row and of two can differ in the last bit
    close: Any = {"rtol": 2e-3, "atol": 1e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.out[1:, :, start:], alone.out, **close)
    torch.testing.assert_close(got.lse[1:, :, start:], alone.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.out[:1], first.out, **close)


def test_lists(device: torch.device) -> None:
    """What the kernels walk over: the tiles of each row, the newest first, then zeros, and two more at the end."""
    q = inputs(5 * TILE + 1, device)[0]
    kept = random_kept(q)
    kept[0, 0], kept[1, 1] = 0, 1
    listed, count, _ = launch_list_tiles(kept, 5 * TILE + 1)
    assert listed.shape == (4 * 15 + 2,)
    rows, square = listed[:-2].view(2, 2, 15).tolist(), as_square(kept, 5 * TILE + 1).cpu()
    for row, head, tile in product(range(2), range(2), range(6)):
        want = [t for t in reversed(range(tile)) if square[row, head, tile, t]]
        assert int(count[2 * row + head, tile]) == len(want)
        at = tile * (tile - 1) // 2
        assert rows[row][head][at : at + tile] == want + [0] * (tile - len(want))
    assert listed[-2:].tolist() == [0, 0]


def test_density() -> None:
    kept = torch.tensor([[[1, 0, 0]]], dtype=torch.uint8)
    assert density(kept, 3 * TILE).item() == pytest.approx(4 / 6)


@in_one_test(
    ("options", "message"),
    [
        ({"causal": False}, "kept is for causal prompts without a window"),
        ({"window": 5}, "kept is for causal prompts"),
        ({"kept": torch.ones(2, 2, 2, dtype=torch.uint8)}, r"uint8 \[2, 2, 3\] .* got torch.uint8 \[2, 2, 2\]"),
        ({"kept": torch.ones(2, 2, 3)}, r"got torch.float32 \[2, 2, 3\]"),
    ],
)
def test_prefill_refuses(options: dict[str, Any], message: str) -> None:
    q, k, v = inputs(3 * TILE, torch.device("cpu"))
    given = {"kept": torch.ones(2, 2, 3, dtype=torch.uint8), **options}
    with pytest.raises(ValueError, match=message):
        prefill(q, k, v, scaling=SCALING, mode="fp16", **given)


def test_more_tiles_than_their_numbers_hold_are_refused() -> None:
    q = torch.empty(1, 1, (1 << 15) * TILE + 1, 0)
    tiles = (1 << 15) + 1
    with pytest.raises(ValueError, match="at most 4194304 tokens"):
        check_kept(torch.empty(1, 1, tiles * (tiles - 1) // 2, dtype=torch.uint8, device="meta"), q.to("meta"))
