"""`turbo-hf bench serve`: what is asked for, what is made of the times, and the command on tiny models."""

from dataclasses import replace

import pytest
from cli_support import check_refused, last_json, run

pytest.importorskip("transformers", minversion="5.19")

from turbo_hf.eval.bench.serve import Job, ServeRow, azure_jobs, percentiles, summed, with_prompts


def test_requests_of_the_trace_that_fit() -> None:
    requests = azure_jobs(10_000, 1 << 20)
    assert 900 < len(requests) <= 1000
    assert requests[0].arrival == 0
    assert [one.arrival for one in requests] == sorted(one.arrival for one in requests)
    fit = [one for one in requests if one.context + one.new <= 500][:7]
    assert azure_jobs(7, 500) == [replace(one, arrival=one.arrival - fit[0].arrival) for one in fit]
    with pytest.raises(ValueError, match=r"no request of the trace has 5 tokens or fewer"):
        azure_jobs(2, 5)


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([7.0]) == {"p50": 7, "p90": 7, "p99": 7}


def test_prompts_begin_alike() -> None:
    first, second = with_prompts([Job(0.0, 9, 2), Job(1.0, 7, 3)], 5, 100, seed=0)
    assert (len(first.prompt), len(second.prompt), second.new, second.arrival) == (9, 7, 3, 1.0)
    assert first.prompt[:5] == second.prompt[:5]
    assert first.prompt[5:7] != second.prompt[5:]


def test_waits_are_counted_from_the_arrival() -> None:
    jobs = [Job(0.0, 1, 3), Job(1.0, 1, 2)]
    row = summed(ServeRow("even", "x", 2), jobs, [[1.0, 2.0, 4.0], [2.0, 3.0]])
    assert row.tokens_s == 5 / 4
    assert row.first_ms == {"p50": 1000, "p90": 1000, "p99": 1000}
    assert row.between_ms == {"p50": 1000, "p90": 2000, "p99": 2000}
    assert row.rows == (3 + 1) / 4


def test_the_command_serves_in_every_way() -> None:
    args = "bench serve --tiny --requests 2 --workload even --context 20 --new 2 --batch 2 --batch-tokens 256 --pool 2k"
    rows = last_json(run(*args.split(), "--preset", "int8", "--device", "cpu", "--json"))["rows"]
    ways = ("Transformers", "Transformers, batches of 2", "int8", "int8, batches of 2")
    assert [row["method"] for row in rows] == list(ways)
    assert all(row["tokens_s"] > 0 and not row["note"] for row in rows)


def test_mistakes_are_one_sentence() -> None:
    check_refused("unknown workload odd; choose from azure, shared, even", "bench", "serve", "--workload", "odd")
    check_refused("Choose what it shall run: --model, --layers 1, or --tiny", "bench", "serve", "--device", "cpu")
