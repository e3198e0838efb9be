"""`turbo-hf bench serve`: what is asked for, what is made of the times, and the command on tiny models."""

import pytest
from bench_support import check_refused, last_json, run

pytest.importorskip("transformers", minversion="5.19")

from turbo_hf.eval.bench.serve import AZURE, Job, jobs_of, summed
from turbo_hf.eval.serve import Request, read_trace


def test_prompts_have_the_lengths_of_the_trace_and_begin_alike() -> None:
    requests = read_trace(AZURE)
    assert len(requests) == 1000
    assert [one.arrival for one in requests] == sorted(one.arrival for one in requests)
    first, second = jobs_of("shared", [Request(0.0, 9, 2), Request(1.0, 7, 3)], 5, 100, seed=0)
    assert (len(first.prompt), len(second.prompt), second.new, second.arrival) == (9, 7, 3, 1.0)
    assert first.prompt[:5] == second.prompt[:5]
    assert first.prompt[5:7] != second.prompt[5:]


def test_waits_are_counted_from_the_arrival() -> None:
    jobs = [Job(0.0, [1], 3), Job(1.0, [1], 2)]
    row = summed("even", "x", jobs, [[1.0, 2.0, 4.0], [2.0, 3.0]])
    assert row.tokens_s == 5 / 4
    assert row.first_ms == {"p50": 1000, "p90": 1000, "p99": 1000}
    assert row.between_ms == {"p50": 1000, "p90": 2000, "p99": 2000}
    assert row.rows == (3 + 1) / 4


def test_the_command_serves_in_every_way() -> None:
    args = "serve --tiny --requests 2 --workload even --context 20 --new 2 --batch 2 --batch-tokens 256 --pool 2k"
    rows = last_json(run(*args.split(), "--preset", "int8", "--device", "cpu", "--json"))["rows"]
    ways = ("Transformers", "Transformers, batches of 2", "int8", "int8, batches of 2")
    assert [row["method"] for row in rows] == list(ways)
    assert all(row["tokens_s"] > 0 and not row["note"] for row in rows)


def test_mistakes_are_one_sentence() -> None:
    check_refused("unknown workload odd; choose from azure, shared, even, copied", "serve", "--workload", "odd")
    check_refused("Choose what it shall run: --layers 1, or --tiny", "serve", "--device", "cpu")
