"""The needle generator and the demonstration."""

from dataclasses import replace
from typing import Any

import pytest
from models import lab_model

from turbo_hf.eval.demo import BASELINE, DemoRow, demo
from turbo_hf.eval.needle import needle_grid, needles


def test_needles_are_seeded_and_of_the_length_asked_for() -> None:
    _, tokenizer = lab_model()
    first, again, other = (needles(tokenizer, 9, 256, 2048, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    lengths = sorted(needle.tokens for needle in first)
    # a prompt ends with the last whole sentence that fits, so it is at most one long sentence short
    assert all(length <= asked for length, asked in zip(lengths, range(256, 2049, 224), strict=True))
    assert lengths[0] > 128
    assert lengths[-1] > 1800
    for needle in first:
        assert needle.prompt.count(needle.answer) == 1
        assert needle.tokens == len(tokenizer(needle.prompt).input_ids)
        assert needle.found_in(f" {needle.answer}.")
        assert not needle.found_in(needle.answer[:-1])


def test_needles_longer_than_the_carried_text() -> None:
    _, tokenizer = lab_model()
    (needle,) = needles(tokenizer, 1, 200, 20000)
    assert 19500 < needle.tokens <= 20000


def test_needles_refuse() -> None:
    with pytest.raises(ValueError, match="has no room"):
        needles(lab_model()[1], 1, 20, 20)


def test_demo_on_the_carried_model() -> None:
    model, tokenizer = lab_model()
    asked = needles(tokenizer, 6, 200, 500, seed=3)
    done: list[tuple[str, int]] = []
    rows = [
        row
        for row, _ in demo(
            model, tokenizer, asked, ["int8", "turbo4"], batch=4, advance=lambda *step: done.append(step)
        )
    ]
    base, int8, turbo4 = rows
    assert [row.method for row in rows] == [BASELINE, "int8", "turbo4"]
    assert done == [(name, n) for name in (BASELINE, "int8", "turbo4") for n in (4, 2)]
    # 6 layers, 2 KV heads of 64, keys and values
    assert base.kv_bytes_per_token == 6 * 2 * 64 * 2 * model.dtype.itemsize
    assert base.compression == 1.0
    assert base.tokens_equal_pct == 100.0
    assert base.needle_right == base.needle_total == 6
    assert base.needle_right - turbo4.needle_right <= 1
    assert turbo4.kv_bytes_per_token < int8.kv_bytes_per_token < base.kv_bytes_per_token


def test_a_rehearsal_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = lab_model()
    asked, generate = needles(tokenizer, 3, 200, 300, seed=3), model.generate
    calls: list[int] = []

    def counted(**inputs: Any) -> Any:
        calls.append(len(inputs["input_ids"]))
        return generate(**inputs)

    def rows(rehearse: bool) -> list[DemoRow]:
        found = demo(model, tokenizer, asked, ["turbo4"], batch=2, rehearse=rehearse)
        return [replace(row, tokens_per_s=0.0) for row, _ in found]

    monkeypatch.setattr(model, "generate", counted)
    assert rows(rehearse=False) == rows(rehearse=True)
    assert calls == 2 * [1, 2, 1] + 2 * [2, 1, 1, 2, 1]


def test_the_grid_fills_every_cell_with_its_own_needle() -> None:
    _, tokenizer = lab_model()
    grid = needle_grid(tokenizer, [800, 1200], [0.0, 0.5, 1.0], [0, 1])
    assert grid == needle_grid(tokenizer, [800, 1200], [0.0, 0.5, 1.0], [0, 1])
    assert len(grid) == 12
    assert len({needle.answer for _, _, needle in grid}) == 12
    for length, _, needle in grid:
        assert needle.tokens <= length
        at = needle.prompt.index(needle.answer) / len(needle.prompt)
        # the frame takes a part of a short prompt
        assert abs(at - needle.depth) < 0.2
