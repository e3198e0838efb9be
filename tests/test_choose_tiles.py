"""The key tiles that a mass rule reads of long prompts, and the mass that it drops."""

import pytest
import torch
from all_pairs import in_one_test
from oracle import dropped_mass

from turbo_hf.eval.bench.oracle import attend
from turbo_hf.layout import PROMPT_TILE as TILE
from turbo_hf.layout import TileRule
from turbo_hf.ops.prefill.reference_tiles import reference_choose_tiles

BARE = TileRule(mass=0.5, peak=1.0, sink_tokens=0, window_tokens=0, tail_tokens=0)


def heads(tokens: int, dim: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """q [4, tokens, dim] and k [2, tokens, dim], tiles of keys with means of their own."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(4, tokens, dim, generator=generator), torch.randn(2, tokens, dim, generator=generator)
    return q, k + torch.randn(2, -(-tokens // TILE), dim, generator=generator).repeat_interleave(TILE, 1)[:, :tokens]


@in_one_test("tokens", [1, TILE, TILE + 1, 5 * TILE, 5 * TILE + 7])
def test_only_tiles_at_or_before_the_rows_and_the_forced_ones(tokens: int) -> None:
    rule = BARE._replace(sink_tokens=1, window_tokens=TILE)
    kept = reference_choose_tiles(*heads(tokens), rule, scaling=0.5)
    tiles = kept.shape[-1]
    at = torch.arange(tiles)
    assert tiles == -(-tokens // TILE)
    assert not (kept & (at[None, :] > at[:, None])).any()
    assert kept[:, at, at].all()
    assert kept[:, :, 0].all()
    assert kept[:, at[1:], at[1:] - 1].all()


@in_one_test("tail", [1, TILE, TILE + 1, 6 * TILE, 10**6])
def test_every_query_of_the_tail_reads_every_key(tail: int) -> None:
    tokens = 6 * TILE - 5
    q, k = heads(tokens)
    kept = reference_choose_tiles(q, k, BARE._replace(tail_tokens=tail), scaling=0.5)
    places = torch.arange(max(0, tokens - tail), tokens)
    assert (dropped_mass(q, k, kept, places, scaling=0.5) == 0).all()
    first = max(0, tokens - tail) // TILE
    assert first < 2 or not kept[:, :first, :first][:, *torch.tril_indices(first, first)].all(-1).any()


@pytest.mark.parametrize("mass", [0.3, 0.9, 1.0])
def test_the_fewest_tiles_that_cover_the_mass(mass: float) -> None:
    q, k = heads(6 * TILE)
    kept = reference_choose_tiles(q, k, BARE._replace(mass=mass), scaling=0.3)
    mean_keys = k.unflatten(1, (6, TILE)).mean(2).repeat_interleave(2, 0)
    for tile in range(1, 6):
        rows = q[:, tile * TILE : (tile + 1) * TILE]
        share = (0.3 * rows @ mean_keys[:, :tile].mT).softmax(-1).mean(1)
        for head in range(4):
            own, read = share[head], kept[head, tile, :tile]
            assert own[read].sum() >= mass - 1e-5
            # without the smallest of them it would not be covered
            assert own[read].sum() - own[read].min() < mass + 1e-5
            assert read.all() or own[read].min() >= own[~read].max()


def test_a_tile_that_one_row_wants_is_read_by_the_peak_alone() -> None:
    q, k = torch.zeros(1, 4 * TILE, 16), torch.zeros(1, 4 * TILE, 16)
    k[0, TILE : 2 * TILE, 0] = 1.0
    k[0, :TILE, 1] = 1.0
    q[..., 1] = 8.0
    q[0, 3 * TILE + 5] = torch.eye(16)[0] * 8
    assert not reference_choose_tiles(q, k, BARE, scaling=1.0)[0, 3, 1]
    assert reference_choose_tiles(q, k, BARE._replace(peak=0.5), scaling=1.0)[0, 3, 1]


def test_keys_that_cancel_in_their_mean_escape_the_choice_and_are_found_by_the_dropped_mass() -> None:
    q, k = heads(4 * TILE, seed=1)
    q, k = q[:1], 0.01 * k[:1]
    k[0, TILE, 0], k[0, TILE + 1, 0] = 30.0, -30.0
    q[..., 0] = 2.0
    kept = reference_choose_tiles(q, k, BARE._replace(mass=0.3), scaling=1.0)
    place = torch.tensor([3 * TILE + 9])
    dropped = dropped_mass(q, k, kept, place, scaling=1.0)
    assert not kept[0, 3, 1]
    assert dropped.item() > 0.99


@pytest.mark.parametrize("more", [{}, {"softcap": 3.0}, {"sinks": torch.tensor([0.0, 9.0, 1.0, -4.0])}])
def test_dropped_mass_bounds_the_error_of_sparse_attention(more: dict[str, object]) -> None:
    """|o - o_S| <= 2 delta max|v|, and o_S is attention over the tiles that are read."""
    q, k = heads(5 * TILE + 3, seed=2)
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(3)).double()
    kept = reference_choose_tiles(q, k, BARE, scaling=0.3, **more)  # type: ignore[arg-type]
    places = torch.arange(0, q.shape[1], 37)
    dropped = dropped_mass(q, k, kept, places, scaling=0.3, **more)  # type: ignore[arg-type]
    assert 0 < dropped.max() < 1
    longest = v.norm(dim=-1).max()
    for head in range(4):
        for i, place in enumerate(places.tolist()):
            seen = kept[head, place // TILE].repeat_interleave(TILE)[: place + 1]
            own = {"scaling": 0.3, "causal": False, **more}
            if "sinks" in more:
                own["sinks"] = more["sinks"][head : head + 1]  # type: ignore[index]
            query, keys, values = q[head : head + 1, place : place + 1], k[head // 2], v[head // 2]
            dense = attend(query, keys[None, : place + 1], values[None, : place + 1], **own)  # type: ignore[arg-type]
            part = attend(query, keys[None, : place + 1][:, seen], values[None, : place + 1][:, seen], **own)  # type: ignore[arg-type]
            gone = 1 - torch.exp(part.lse - dense.lse).item()
            assert dropped[head, i].item() == pytest.approx(gone, abs=1e-9)
            assert (dense.out - part.out).norm() <= 2 * dropped[head, i] * longest + 1e-9
