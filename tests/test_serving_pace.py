"""When the next batch of continuous batching is prepared, by a simulated clock."""

import pytest

from turbo_hf.serving.pace import MARGIN, MOST_WAIT, Pace


def simulate(took: list[float], preparation: float) -> tuple[list[float], float]:
    """Passes that take so long on the device: how long each was waited for before the next was prepared, and how long
    the device stood still in all."""
    pace, now, free, idle = Pace(), 0.0, 0.0, 0.0
    waits, ends = [], []
    for n, seconds in enumerate(took):
        waits.append(pace.wait(now))
        now = begun = now + waits[-1]
        now += preparation
        idle += max(0.0, now - free) * (n > 0)
        free = max(now, free) + seconds
        ends.append(free)
        pace.launched("a", begun, now)
        if n:
            runs = ends[n - 1] > now
            now = max(now, ends[n - 1])
            pace.ended(now, just_now=runs)
    return waits, idle


def test_a_batch_is_prepared_just_before_the_pass_ahead_ends() -> None:
    waits, idle = simulate([0.010] * 30, 0.003)
    assert waits[10:] == pytest.approx([0.010 - 0.003 - MARGIN] * 20)
    assert idle == 0


def test_passes_that_become_quicker_are_found_out() -> None:
    waits, idle = simulate([0.020] * 20 + [0.010] * 30, 0.003)
    assert waits[-1] == pytest.approx(0.010 - 0.003 - MARGIN)
    assert idle <= 0.01, "one pass, in all"


def test_a_pass_that_was_held_up_holds_up_nothing_else() -> None:
    waits, _ = simulate([30.0] + [0.010] * 20, 0.003)
    assert max(waits) == MOST_WAIT
    waits, _ = simulate([0.010] * 10 + [30.0] + [0.010] * 20, 0.003)
    assert max(waits) == pytest.approx(0.010 - 0.003 - MARGIN)


def test_passes_of_two_lengths_keep_the_gpu_busy() -> None:
    waits, idle = simulate([0.010, 0.020] * 20, 0.003)
    assert waits[10:] == pytest.approx([0.010 - 0.003 - MARGIN] * 30)
    assert idle == 0


def test_what_takes_longer_to_prepare_than_a_pass_is_prepared_at_once() -> None:
    waits, _ = simulate([0.002] * 20, 0.003)
    assert waits == [0.0] * 20


def test_nothing_is_waited_for_where_nothing_is_known() -> None:
    pace = Pace()
    assert pace.wait(1.0) == 0
    pace.ended(1.0, just_now=True)
    for begun in (1.0, 2.0):
        pace.launched(None, begun, begun + 0.1)
        assert pace.wait(begun + 0.1) == 0
    pace.ended(3.0, just_now=True)
    pace.launched("a", 4.0, 4.1)
    pace.reset()
    assert pace.wait(5.0) == 0
