"""Generated questions: seeded, of the length asked for, and with their answers where they say."""

from typing import Any

import pytest
from models import lab_model

from turbo_hf.eval.needle import needle_grid


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return lab_model()[1]


def test_the_grid_fills_every_cell_with_its_own_needle(tokenizer: Any) -> None:
    grid = needle_grid(tokenizer, [800, 1200], [0.0, 0.5, 1.0], [0, 1])
    assert grid == needle_grid(tokenizer, [800, 1200], [0.0, 0.5, 1.0], [0, 1])
    assert len(grid) == 12
    assert len({needle.answer for _, _, needle in grid}) == 12
    for length, _, needle in grid:
        assert needle.tokens <= length
        at = needle.prompt.index(needle.answer) / len(needle.prompt)
        # the frame takes a part of a short prompt
        assert abs(at - needle.depth) < 0.2
