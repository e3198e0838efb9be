"""The suite serve: a trace, static batches, what is measured and what is only counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LAB_MODEL, tiny_llama
from typer.testing import CliRunner

from turbo_hf.cli.main import app
from turbo_hf.eval import serve
from turbo_hf.eval.methods import method_named
from turbo_hf.eval.serve import Request, chosen, level, percentiles, read_trace, replay, summary

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [
        "2023-11-16 18:15:48.0000000,30,2",
        "2023-11-16 18:15:46.5000000,20,4",
        "2023-11-16 18:15:47.0000000,900,9",
    ]
    path.write_text(HEAD + "\n".join([*lines, "2023-11-16 18:15:49.0000000,9,3"]) + "\n")
    return path


def test_a_trace_is_read_in_order_of_arrival(trace: Path) -> None:
    requests = read_trace(trace)
    assert requests == [Request(0.0, 20, 4), Request(0.5, 900, 9), Request(1.5, 30, 2), Request(2.5, 9, 3)]
    assert chosen(requests, 2, 100) == ([requests[0], requests[2]], 1)
    assert chosen(requests, 9, 1000) == (requests, 0)
    with pytest.raises(ValueError, match=r"no request of the trace has 5 tokens or fewer"):
        chosen(requests, 2, 5)


def test_traces_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a trace at .*none.csv; there is no such file"):
        read_trace(tmp_path / "none.csv")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(
        ValueError, match=r"expected the columns TIMESTAMP, ContextTokens, GeneratedTokens in .*'a', 'b'"
    ):
        read_trace(other)
    other.write_text(HEAD)
    with pytest.raises(ValueError, match="holds no request"):
        read_trace(other)


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([7.0]) == {"p50": 7, "p90": 7, "p99": 7}


class Ticks:
    """A clock whose marks are a second apart."""

    def __init__(self, marks: int):
        self.marks = marks

    def ms(self, start: int, end: int) -> float:
        return 1e3 * (range(self.marks)[end] - start)


def test_latencies_count_the_wait_and_end_with_a_request_s_own_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def generate(model: Any, method: Any, lengths: list[int], new: int, seed: int) -> tuple[Ticks, None]:
        asked.append((lengths, new))
        # a mark at the start, one a token, and one at the end
        return Ticks(new + 2), None

    monkeypatch.setattr(serve, "_generate", generate)
    requests = [Request(0.0, 20, 4), Request(1.5, 30, 2), Request(2.0, 9, 3)]
    found = replay(tiny_llama(), method_named("fp16"), requests, 2, 0)
    assert found is not None
    served, busy = found
    # first the widest batch, for warmth
    assert asked == [([20, 30], 3), ([20, 30], 4), ([9], 3)]
    assert busy == 5 + 4
    assert [one.first_ms for one in served] == [1000, 1000, 1000]
    assert [one.done_ms for one in served] == [4000, 2000, 3000]
    # the first batch begins when its second request has come, at 1.5, and ends at 6.5
    assert [one.latency_ms for one in served] == [1500 + 4000, 2000, 4500 + 3000]
    own = summary(served, busy)
    assert (own["requests"], own["new_tokens"], own["tokens_s"]) == (3, 9, 1.0)
    assert own["latency_ms"] == {"p50": 5500, "p90": 7500, "p99": 7500}


def test_memory_that_runs_out_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(serve, "_generate", full)
    monkeypatch.setattr("turbo_hf.eval.bench.clock.free_memory", lambda: None)
    model, method = tiny_llama(), method_named("turbo4")
    found = level(model, method, 20, 2, 4, 1, 0)
    assert (found.method, found.context, found.tokens_s, found.kv_bytes) == ("turbo4", 20, None, None)
    assert replay(model, method, [Request(0.0, 20, 4)], 2, 0) is None


@pytest.mark.parametrize("name", ["fp16", "turbo4"])
def test_a_level_measures_the_cache_it_made(name: str) -> None:
    found = level(tiny_llama(), method_named(name), 100, 2, 4, 2, 0)
    assert found.tokens_s
    assert found.first_ms
    assert found.step_ms
    # 2 layers, 2 KV heads of 16, float32, and the last token is never stored
    dense = 2 * 103 * 2 * 2 * 2 * 16 * 4
    assert found.kv_bytes is not None
    assert (found.kv_bytes == dense) == (name == "fp16")
    assert found.kv_bytes <= dense
    assert found.peak_bytes is None


def test_the_suite_runs_keeps_what_is_done_and_refuses(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(model: str, *more: str, code: int = 0) -> Any:
        words = ["eval", model, "--suite", "serve", "--context", "40", "--new", "3", "--rounds", "1", "--batch", "2"]
        words += ["--trace", str(trace), "--longest", "100", "--device", "cpu", "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == code, result.output
        return result

    result = command(str(LAB_MODEL), "--methods", "turbo4", "--json")
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert [row["method"] for row in found["levels"]] == ["fp16", "fp16 again", "turbo4"]
    assert set(found["replay"]) == {"fp16", "fp16 again", "turbo4"}
    assert all(own["requests"] == 3 for own in found["replay"].values())
    assert "1 longer or empty ones before the last of them were passed by" in found["notes"][1]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.html", "report.md", "serve.json", "run_meta.json", "memory.png", "replay_turbo4.json"} <= names
    monkeypatch.setattr(serve, "_generate", None)
    again = json.loads(command(str(LAB_MODEL), "--methods", "turbo4", "--json").stdout.strip().splitlines()[-1])
    assert (again["levels"], again["replay"]) == (found["levels"], found["replay"])
    for model, methods, message in (
        (str(LAB_MODEL), "kivi4", "kivi4 is simulated, for accuracy only: it has no speed to measure."),
        ("random:llama9", "turbo4", "unknown shape random:llama9; write random:NAME with a name of llama3-8b"),
        ("random:llama3-8b:tiny", "turbo4", "holds a run that cannot be continued by this one"),
    ):
        told = " ".join(command(model, "--methods", methods, code=1).output.split())
        assert message in told
