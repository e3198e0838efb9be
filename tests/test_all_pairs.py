"""The parametrization by pairs that other tests stand on."""

import os
from itertools import combinations, product
from math import prod
from pathlib import Path

import pytest
from all_pairs import all_pairs, covering, in_modes, in_one_test, in_turn

from turbo_hf.config.turbo_config import ATTENTION_MODES


@pytest.mark.parametrize("sizes", [(1,), (3, 2), (4, 5, 2), (2, 2, 5, 2, 2), (3, 3, 3, 3)])
def test_every_pair_of_values_meets(sizes: tuple[int, ...]) -> None:
    rows = covering(*sizes)
    assert rows == covering(*sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(rows) <= max(prod(sizes) // 2, prod(sizes[:2]))


def test_cases_have_names_and_keep_their_marks() -> None:
    gpu = pytest.param(3, marks=pytest.mark.gpu, id="three")
    (names, cases) = all_pairs(x=[1, gpu], y=[True, (4, 5)]).mark.args
    assert names == ["x", "y"]
    assert {case.id for case in cases} == {"1-True", "1-4-5", "three-True", "three-4-5"}
    assert all(bool(case.marks) == (case.values[0] == 3) for case in cases)


def test_each_value_has_its_turn() -> None:
    cases = in_turn(x=[1, 2, 3], y=["a", "b"]).mark.args[1]
    assert [case.values for case in cases] == [(1, "a"), (2, "b"), (3, "a")]


def test_other_modes_take_the_last_value() -> None:
    cases = [case.values for case in in_modes(x=[1, 2]).mark.args[1]]
    assert [mode for x, mode in cases if x == 1] == ["turbo", "fp16"]
    assert [mode for x, mode in cases if x == 2] == list(ATTENTION_MODES)
    assert [case.values for case in in_modes("turbo", x=[1, 2]).mark.args[1]] == [c for c in cases if c != (1, "fp16")]


def test_all_cases_of_one_test_run_and_those_that_fail_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @in_one_test(("x", "y"), [(1, 2), pytest.param(3, 0, id="three"), (4, 5), (6, 0)])
    @in_one_test("z", [7])
    def divides(x: int, y: int, z: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CASE", str(x))
        assert not list(tmp_path.iterdir())
        (tmp_path / str(x)).touch()
        seen.append((x, z))
        if x == 6:
            with pytest.raises(ValueError, match="not raised"):
                pass
        assert x // y >= 0

    with pytest.raises(ZeroDivisionError) as caught:
        divides(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert seen == [(1, 7), (3, 7), (4, 7), (6, 7)]
    assert caught.value.__notes__[-1] == "2 of 4 cases failed: three; (6, 0)"
    assert "CASE" not in os.environ
