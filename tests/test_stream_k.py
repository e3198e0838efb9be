"""Plans of decode attention: every tile once, in order, in even shares."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbo_hf.ops.decode.stream_k import LivePlan, Plan, even_rounds, stream_k, tiles_of


def shares(plan: Plan, tiles: list[int]) -> list[list[tuple[int, int]]]:
    """The (output, tile) pairs of each CTA, walked as the kernel walks them."""
    found = []
    for output, tile, count, _ in plan.words[: 4 * plan.ctas].view(-1, 4).tolist():
        run, at = [], (output, tile)
        for _ in range(count):
            run.append(at)
            at = (at[0], at[1] + 1) if at[1] + 1 < tiles[at[0]] else (at[0] + 1, 0)
        found.append(run)
    return found


def check(plan: Plan, tiles: list[int]) -> list[list[tuple[int, int]]]:
    """Assert that a plan covers all tiles, and says of each output who computes it; return the shares."""
    found = shares(plan, tiles)
    assert [pair for run in found for pair in run] == [(o, t) for o, n in enumerate(tiles) for t in range(n)]
    assert all(found)
    assert plan.outputs == len(tiles)
    assert plan.steps == sum(tiles)
    groups = plan.words[4 * plan.ctas :].view(-1, 2).tolist()
    for output, (first, count) in enumerate(groups):
        assert [c for c, run in enumerate(found) if any(o == output for o, _ in run)] == [*range(first, first + count)]
    return found


some_tiles = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(tiles=some_tiles, ctas=st.integers(1, 30), setup=st.sampled_from((0.0, 1.0, 3.5)), data=st.data())
def test_any_stream_k_plan(tiles: list[int], ctas: int, setup: float, data: st.DataObject) -> None:
    cost = data.draw(st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=len(tiles), max_size=len(tiles)))
    plan = stream_k(np.array(tiles), np.array(cost), ctas, setup)
    found = check(plan, tiles)
    assert plan.ctas <= ctas
    total = sum((n * c for n, c in zip(tiles, cost, strict=True)), setup * len(tiles))
    for run in found:
        load = sum(cost[o] for o, _ in run) + setup * len({o for o, t in run if t == 0})
        assert load <= total / ctas + 2 * max(cost) + 3 * setup


def test_as_many_outputs_as_ctas_are_not_cut() -> None:
    plan = stream_k(np.full(264, 9), np.ones(264), 264, 2.0)
    assert plan.words[4 * plan.ctas :].view(-1, 2)[:, 1].eq(1).all()


def test_one_long_output_is_cut_evenly() -> None:
    plan = stream_k(np.array([1000]), np.ones(1), 132)
    assert {len(run) for run in shares(plan, [1000])} == {7, 8}


def test_outputs_alike_are_cut_alike() -> None:
    plan = stream_k(np.full(8, 33), np.full(8, 1.3), 128, 2.6)
    assert [len(run) for run in shares(plan, [33] * 8)] == [*[2] * 15, 3] * 8


def test_the_number_of_ctas_that_fit_makes_no_staircase() -> None:
    """136 outputs on 132 CTAs cost 136 / 132 of what 132 cost, where one CTA an output would cost twice as much."""
    cost = np.ones(136)
    longest = max(len(run) for run in shares(stream_k(np.full(136, 64), cost, 132), [64] * 136))
    assert longest <= 64 * 136 / 132 + 1


def test_tiles_of_rows_count_the_open_tokens_as_one() -> None:
    assert tiles_of([0, 1, 4, 5], 4) == [1, 2, 2, 3]


@pytest.mark.parametrize(("tiles", "ctas"), [([1, 0], 2), ([1], 0)], ids=["empty", "no_ctas"])
def test_refuses_what_no_plan_covers(tiles: list[int], ctas: int) -> None:
    with pytest.raises(ValueError, match="a plan needs CTAs, and a tile of each output; got"):
        stream_k(np.array(tiles, dtype=np.int64), np.ones(len(tiles)), ctas)


@pytest.mark.parametrize(
    ("ctas", "outputs", "kept"),
    [(264, 8, 256), (132, 2, 128), (264, 128, 256), (264, 136, 264), (20, 8, 20), (264, 100, 264), (3, 4, 3)],
)
def test_a_round_of_the_merge_is_full_or_worth_it(ctas: int, outputs: int, kept: int) -> None:
    assert even_rounds(ctas, outputs, 16) == kept


def test_rows_that_grow_move_the_plan_once_a_doubling() -> None:
    """Five rows of two heads, a tile more every 128 steps: each move is a capture."""

    def plan(sealed: tuple[int, ...]) -> Plan:
        tiles = np.repeat(np.array(sealed) + 1, 2)
        return stream_k(tiles, np.ones(len(tiles)), int(tiles.sum()), 0.5)

    live = LivePlan(plan, [0] * 5, 264, torch.device("cpu"))
    moves = []
    for tile in range(1, 16):
        words = live.words
        live.update([tile] * 5)
        made = plan((tile,) * 5)
        assert live.ctas >= made.ctas
        assert torch.equal(live.words[: 4 * made.ctas], made.words[: 4 * made.ctas])
        assert not live.words[4 * made.ctas : 4 * live.ctas].any()
        moves += [tile] if live.words is not words else []
    assert moves == [1, 2, 4, 8]


def test_a_plan_with_room_for_parts_moves_for_more_alone() -> None:
    def plan(sealed: tuple[int, ...]) -> Plan:
        return stream_k(np.array(tiles_of(sealed, 4)), np.ones(1), min(64, tiles_of(sealed, 4)[0]))

    live = LivePlan(plan, [0], 264, torch.device("cpu"), parts=16)
    words = live.words
    for sealed in (60, 0, 30, 60):
        live.update([sealed])
        assert live.words is words
        assert live.parts == 16
    live.update([200])
    assert live.words is not words
    words = live.words
    live.update([0])
    assert (live.words is words, live.parts) == (True, 64)
