"""Evaluation: the report's means, errors, lengths and pairs, of verdicts that are written down here."""

from dataclasses import replace

import pytest

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

from turbo_hf.eval.answers import Batch
from turbo_hf.eval.evaluate import Outcome
from turbo_hf.eval.methods import BASELINE
from turbo_hf.eval.report import length_class, report, tables
from turbo_hf.eval.scorers import OWN, Scorer
from turbo_hf.eval.tasks import Spec


def outcome(*tasks: list[int], one_length: tuple[int, ...] = ()) -> Outcome:
    """Verdicts of tasks t0, t1, ..., whose items have 100, 200, 400, ... tokens, or all of them 100."""
    samples = {
        f"t{i}": [
            {"doc_id": n, "doc": {"length": 100 if i in one_length else 100 << n}, "filter": "none", "right": right}
            for n, right in enumerate(own)
        ]
        for i, own in enumerate(tasks)
    }
    return Outcome({"results": {}}, samples, [Batch(4, 8, 2.0, 100, 10)])


def test_no_table_shows_dashes_alone() -> None:
    specs = [Spec("t0", {}, OWN)]
    silent = replace(outcome([1]), batches=[])
    # log-likelihoods alone: no cache was measured, nothing was generated
    shown = tables(report(specs, {BASELINE: silent, "x": silent}))
    assert "memory and speed of generation" not in [table.title for table in shown]
    # a run of which one method is still to generate
    *_, memory = tables(report(specs, {BASELINE: outcome([1]), "x": outcome([1]), "y": silent}))
    assert [row[0] for row in memory.rows] == [BASELINE, "x"]


def test_means_leave_out_what_the_baseline_cannot_do() -> None:
    good, bad = [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]
    specs = [Spec("t0", {}, OWN), Spec("t1", {}, (Scorer("other", metric="right"), *OWN))]
    found = report(specs, {BASELINE: outcome(good, bad), "x": outcome([1, 1, 0, 0, 1], bad)})
    every, sure = found["means"]
    assert (every["tasks"], every["items"], sure["tasks"], sure["items"]) == (2, 10, 1, 5)
    assert every["methods"]["x"]["accuracy"] == pytest.approx(0.4)
    assert (sure["methods"]["x"]["lost"], sure["methods"]["x"]["gained"]) == (2, 1)
    assert sure["methods"]["x"]["p"] == 1.0
    # lengths 100, 200, ... in classes of powers of two, both tasks together
    assert [(row["up_to"], row["items"]) for row in found["lengths"]] == [(128 << n, 2) for n in range(5)]
    assert [row["methods"]["x"]["right"] for row in found["lengths"]] == [2, 1, 0, 0, 1]
    # of five pairs -1 -1 +1: variance (3 - 5 * 0.2 ** 2) / 4, and the other task has no difference
    error = pytest.approx(100 * (0.7 / 5) ** 0.5 / 2)
    assert found["differences"] == [{"method": "x", "mean": -10.0, "stderr": error, "worst_task": "t0", "worst": -20.0}]
    assert found["needles"] == {}
    # one item has no error, nor has a mean that it is part of
    single = report(specs[:1], {BASELINE: outcome([1]), "x": outcome([0])})
    assert single["means"][0]["methods"]["x"]["stderr"] is single["differences"][0]["stderr"] is None
    titled = {title: rows for title, _, rows in tables(single)}
    assert titled["points of accuracy against fp16 ± standard error of the pairs"][0][1] == "-100.00"
    assert found["serving"]["x"] == {
        "simulated": False,
        "prompts": 4,
        "kv_bytes_per_token": 10,
        "compression": 1.0,
        "tokens_per_s": 4.0,
    }


def test_the_standard_error_of_a_share_is_that_of_a_sample() -> None:
    """sqrt(p (1 - p) / (n - 1)): of 4 right of 5, sqrt(0.8 * 0.2 / 4)."""
    found = report([Spec("t0", {}, OWN)], {BASELINE: outcome([1, 1, 1, 1, 0]), "x": outcome([1, 0, 0, 0, 0])})
    error = pytest.approx((0.8 * 0.2 / 4) ** 0.5)
    for row in (found["accuracy"][0], found["means"][0]):
        assert row["methods"][BASELINE]["stderr"] == error
        assert row["methods"]["x"]["stderr"] == error


@pytest.mark.parametrize(
    ("doc", "up_to"),
    [
        pytest.param({"length": 1}, 1, id="one"),
        pytest.param({"length": 1023}, 1024, id="below"),
        pytest.param({"length": 1024}, 1024, id="power"),
        pytest.param({"length": 1025}, 2048, id="above"),
        pytest.param({"length": 0}, 0, id="zero"),
        pytest.param({}, 0, id="unknown"),
    ],
)
def test_a_length_belongs_to_the_power_of_two_that_it_does_not_exceed(doc: dict[str, int], up_to: int) -> None:
    assert length_class(doc) == up_to


def test_a_task_of_one_length_tells_nothing_of_lengths() -> None:
    specs = [Spec("t0", {}, OWN), Spec("t1", {}, OWN)]
    several, one = [1, 1, 0], [1, 1, 1, 0]
    found = report(specs, {BASELINE: outcome(several, one, one_length=(1,))})
    assert [(row["up_to"], row["items"]) for row in found["lengths"]] == [(128, 1), (256, 1), (512, 1)]
    assert report(specs[1:], {BASELINE: outcome(several, one, one_length=(1,))})["lengths"] == []
