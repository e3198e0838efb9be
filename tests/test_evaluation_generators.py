"""Generated questions: seeded, of the length asked for, and with their answers where they say."""

from pathlib import Path
from typing import Any

import pytest
from models import lab_model

from turbo_hf.eval import ruler
from turbo_hf.eval.needle import needle_grid
from turbo_hf.eval.tasks import ruler_task


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


@pytest.mark.parametrize("task", ruler.NIAH_TASKS)
def test_ruler_questions_are_seeded_fit_and_hold_their_answers(tokenizer: Any, task: str) -> None:
    text = ruler.sources()
    made = ruler.questions(task, tokenizer, 1024, 3, text)
    assert made == ruler.questions(task, tokenizer, 1024, 3, text)
    assert made != ruler.questions(task, tokenizer, 1024, 3, text, seed=43)
    many = {"niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    for question in made:
        tokens = len(tokenizer(question.prompt).input_ids)
        assert 700 < tokens + ruler.REPLY_TOKENS <= 1024
        assert len(set(question.answers)) == many
        assert all(answer in question.prompt for answer in question.answers)
        assert question.depth is not None
        at = question.prompt.index(question.answers[0]) / len(question.prompt)
        assert abs(at - question.depth) < 0.3


def test_generators_refuse(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="unknown RULER task qa_1; tasks are niah_single_1"):
        ruler.questions("qa_1", tokenizer, 1024, 1, ruler.sources())
    with pytest.raises(ValueError, match=r"niah_single_1 has no room in 128 tokens for its smallest question"):
        ruler.questions("niah_single_1", tokenizer, 128, 1, ruler.sources())
    spec, notes = ruler_task("niah_single_1", tokenizer, [128], 2, ruler.sources())
    assert spec is None
    assert notes == [
        "ruler_niah_single_1: niah_single_1 has no room in 128 tokens for its smallest question and reply. Left out."
    ]


def test_essays_of_the_data_folder_are_the_haystack(tmp_path: Path) -> None:
    folder = tmp_path / "needle" / "essays"
    folder.mkdir(parents=True)
    (folder / "one.txt").write_text("Some words stand here.  Others stand\nthere.")
    found = ruler.sources(tmp_path)
    assert found.essays == ["Some words stand here.", "Others stand there."]
    assert found.words == ["here", "others", "some", "stand", "there", "words"]
    assert ruler.sources(tmp_path / "nowhere") == ruler.sources()
