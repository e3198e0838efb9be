"""Generated questions: seeded, of the length asked for, and with their answers where they say."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from all_pairs import in_one_test
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


@in_one_test("task", ruler.REPLIES)
def test_ruler_questions_are_seeded_fit_and_hold_their_answers(tokenizer: Any, task: str) -> None:
    text = ruler.sources()
    made = ruler.questions(task, tokenizer, 1024, 3, text)
    assert made == ruler.questions(task, tokenizer, 1024, 3, text)
    assert made != ruler.questions(task, tokenizer, 1024, 3, text, seed=43)
    many = {"vt": 5, "cwe": 10, "fwe": 3, "niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    for question in made:
        tokens = len(tokenizer(question.prompt).input_ids)
        assert 700 < tokens + ruler.REPLIES[task] <= 1024
        assert len(set(question.answers)) == many
        # cwe asks after its worked example; there the first words are named too
        body = question.prompt.split("Question:")[-2] if task in ("cwe", "fwe") else question.prompt
        assert all(answer in body for answer in question.answers)
        assert (question.depth is not None) == task.startswith("niah")
        if question.depth is not None:
            at = question.prompt.index(question.answers[0]) / len(question.prompt)
            assert abs(at - question.depth) < 0.3


def test_the_words_asked_for_are_the_most_frequent(tokenizer: Any) -> None:
    text = ruler.sources()
    (common,) = ruler.questions("cwe", tokenizer, 1024, 1, text)
    own = common.prompt.split("Memorize the ones that appear most often.\n")[-1].split("\nQuestion")[0]
    counts = Counter(own.split()[1::2])
    assert {word for word, _ in counts.most_common(10)} == set(common.answers)
    assert {counts[word] for word in common.answers} == {6}
    (frequent,) = ruler.questions("fwe", tokenizer, 1024, 1, text)
    own = frequent.prompt.split("coded words. ")[1].split("\nQuestion")[0]
    counts = Counter(own.split())
    assert [word for word, _ in counts.most_common(4)] == ["...", *frequent.answers]


def test_variables_are_a_chain(tokenizer: Any) -> None:
    (question,) = ruler.questions("vt", tokenizer, 1024, 1, ruler.sources())
    own = question.prompt.split("Memorize and track")[-1]
    value = own.split("assigned the value ")[1].split(" ")[0]
    first, *others = question.answers
    places = [own.index(f"VAR {first} = {value}")]
    places += [own.index(f"VAR {b} = VAR {a} ") for a, b in pairwise(question.answers)]
    assert places == sorted(places)
    assert len(others) == 4


def test_generators_refuse(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="unknown RULER task qa_1; tasks are niah_single_1"):
        ruler.questions("qa_1", tokenizer, 1024, 1, ruler.sources())
    with pytest.raises(ValueError, match=r"cwe has no room in 256 tokens: the smallest question takes \d+"):
        ruler.questions("cwe", tokenizer, 256, 1, ruler.sources())
    with pytest.raises(ValueError, match=r"a list of 30 different words was asked for; the sources have 20"):
        ruler._list(30, 6, 1, random.Random(0), ruler.Sources(["A."], [f"w{i}" for i in range(20)]))
    assert ruler.questions("cwe", tokenizer, 4096, 1, ruler.sources())[0].length == 4096
    spec, notes = ruler_task("cwe", tokenizer, [256], 2, ruler.sources())
    assert spec is None
    assert notes[0].startswith("ruler_cwe: cwe has no room in 256 tokens")


def test_essays_of_the_data_folder_are_the_haystack(tmp_path: Path) -> None:
    folder = tmp_path / "needle" / "essays"
    folder.mkdir(parents=True)
    (folder / "one.txt").write_text("Some words stand here.  Others stand\nthere.")
    found = ruler.sources(tmp_path)
    assert found.essays == ["Some words stand here.", "Others stand there."]
    assert found.words == ["here", "others", "some", "stand", "there", "words"]
    assert ruler.sources(tmp_path / "nowhere") == ruler.sources()
