"""`turbo-hf bench serve`: what is asked for, what is made of the times, and the command on tiny models."""

from types import SimpleNamespace

import pytest
from bench_support import check_refused, last_json, run

pytest.importorskip("transformers", minversion="5.19")

from turbo_hf.eval.bench.serve import AZURE, Job, _note_hits, jobs_of, summed
from turbo_hf.eval.serve import Request, read_trace


def test_prompts_have_the_lengths_of_the_trace_and_begin_alike() -> None:
    requests = read_trace(AZURE)
    assert len(requests) == 1000
    assert [one.arrival for one in requests] == sorted(one.arrival for one in requests)
    first, second = jobs_of([Request(0.0, 9, 2), Request(1.0, 7, 3)], 5, 100, seed=0)
    assert (len(first.prompt), len(second.prompt), second.new, second.arrival) == (9, 7, 3, 1.0)
    assert first.prompt[:5] == second.prompt[:5]
    assert first.prompt[5:7] != second.prompt[5:]
    begins = [job.prompt[:5] for job in jobs_of([Request(0.0, 9, 2)] * 5, 5, 100, seed=0, own_every=3)]
    assert begins[1] == begins[2] == begins[4] != begins[0]
    assert len({tuple(begin) for begin in begins}) == 3


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


def test_requests_that_find_a_prefix_are_noted() -> None:
    cache = SimpleNamespace(search_prefix_match=lambda request_id, prompt_ids: 64 * (len(prompt_ids) > 64))
    hits = _note_hits(cache)
    assert [cache.search_prefix_match(name, [1] * count) for name, count in (("0", 9), ("1", 70))] == [0, 64]
    assert hits == {"1"}


def test_mistakes_are_one_sentence() -> None:
    check_refused("unknown workload odd; choose from azure, shared, even, copied", "serve", "--workload", "odd")
    check_refused("Choose what it shall run: --layers 1, or --tiny", "serve", "--device", "cpu")
