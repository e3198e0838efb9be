"""`turbo-hf bench replay`: the workloads of `bench serve`, sent to servers that speak the OpenAI API.

`turbo-hf serve`, vLLM and others: the client is the same for all, and reads their streams.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
import typer

from turbo_hf.console import Json, load_tokenizer, mistakes_end_the_command
from turbo_hf.eval.bench import runner, serve
from turbo_hf.eval.bench.serve import WORKLOADS, Job, ServeRow
from turbo_hf.eval.bench.shapes import parse_tokens
from turbo_hf.eval.needle import carried_sentences
from turbo_hf.models.versions import version_of

WAIT_S = 600.0
"""Seconds without a piece of an answer after which a server counts as gone."""


class Answer(NamedTuple):
    """What came of one request.

    times: seconds from the first arrival to each piece of the answer.
    tokens, prompt: what the server counted.
    """

    times: list[float]
    tokens: int
    prompt: int


def text_prompts(jobs: Sequence[Job], shared: int, tokenizer: Any, start: int) -> list[str]:
    """A prompt of about as many tokens as each job asks for: a carried text, begun at another word for each.

    Args:
        shared: tokens that all prompts begin with. start: the first of them; others make other prompts.
    """
    ids = tokenizer(" ".join(carried_sentences()), add_special_tokens=False)["input_ids"]

    def text(at: int, count: int) -> str:
        told: str = tokenizer.decode([ids[(at + i) % len(ids)] for i in range(count)], skip_special_tokens=True)
        return told

    common = text(start, shared) if shared else ""
    return [common + text(start + 1009 * n + 17, job.context - shared) for n, job in enumerate(jobs)]


def send(client: Any, name: str, jobs: Sequence[Job], prompts: Sequence[str], extra: dict[str, Any]) -> list[Answer]:
    """Send each job when it arrives, and read its stream. extra: further fields of each request."""
    begin = time.perf_counter()

    def one(job: Job, prompt: str) -> Answer:
        time.sleep(max(0.0, begin + job.arrival - time.perf_counter()))
        times, usage = [], None
        asked = {"prompt": prompt, "max_tokens": job.new, "temperature": 0, "stream_options": {"include_usage": True}}
        for piece in client.completions.create(model=name, stream=True, extra_body=extra, **asked):
            if piece.choices and piece.choices[0].text:
                times.append(time.perf_counter() - begin)
            usage = piece.usage or usage
        if usage is None or not times:
            raise ValueError("a stream ended without text, or without the usage that was asked for")
        return Answer(times, usage.completion_tokens, usage.prompt_tokens)

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(one, jobs, prompts))


def measured(address: str, row: ServeRow, jobs: Sequence[Job], prompts: Sequence[list[str]], extra: Any) -> ServeRow:
    """The row of one server: its figures, or what went wrong. prompts: those of the first replay and of the second."""
    import openai  # noqa: PLC0415 - optional

    try:
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=WAIT_S) as client:
            name = next(iter(client.models.list())).id
            # kernels compile and steps are captured
            send(client, name, jobs, prompts[0], extra)
            answers = send(client, name, jobs, prompts[1], extra)
    except Exception as error:  # a server that fails must not cost the others their figures
        return replace(row, note=f"failed: {type(error).__name__}: {str(error).strip()}")
    found = serve.summed(row, jobs, [answer.times for answer in answers])
    tokens, asked = (sum(counts) for counts in ([a.tokens for a in answers], [job.new for job in jobs]))
    whole = max(answer.times[-1] for answer in answers) - min(job.arrival for job in jobs)
    note = f"{tokens} tokens of {asked} asked for, prompts of {sum(a.prompt for a in answers)} tokens together"
    return replace(found, tokens_s=tokens / whole, note=note)


def replay_command(
    server: Annotated[list[str], typer.Argument(help="Addresses, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="The served model, a folder or a Hub id: its tokenizer makes prompts.")],
    workload: Annotated[list[str] | None, typer.Option(help=f"{', '.join(WORKLOADS)}; may be repeated.")] = None,
    requests: serve.Requests = 128,
    context: serve.Context = "8k",
    prefix: serve.Prefix = "4k",
    new: serve.New = 128,
    speedup: serve.Speedup = 0,
    gap: serve.Gap = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers as long as asked for; turbo-hf serve and vLLM know how.")
    ] = False,
    folder: runner.Folder = None,
    json_line: Json = False,
) -> None:
    """The workloads of `bench serve`, sent to running servers that speak the OpenAI API, one after the other.

    Each is sent twice with other prompts, and the second time counts. Needs the package openai.
    """
    given = dict(locals())
    with mistakes_end_the_command():
        if version_of("openai") is None:
            raise ValueError("bench replay needs the package openai: pip install 'turbo_hf[serve]'.")
        asked = serve.asked_jobs(workload or ["azure"], requests, context, prefix, new, speedup, gap)
        tokenizer = load_tokenizer(model)
        bench = runner.BenchRun[ServeRow]("replay", torch.device("cpu"), folder)
    extra = {"ignore_eos": True} if ignore_eos else {}

    def measure(name: str, tell: Callable[[str], None]) -> list[ServeRow]:
        jobs, shared, rows = asked[name], parse_tokens(prefix) if name == "shared" else 0, []
        prompts = [text_prompts(jobs, shared, tokenizer, 40_009 * n) for n in range(2)]
        for address in server:
            tell(f"{name}: {address}")
            rows.append(measured(address, ServeRow(name, address, len(jobs)), jobs, prompts, extra))
        return rows

    bench.each(asked, measure, serve.print_rows, options=given)
    bench.finish(json_line, [f"{row.method}, {row.workload}: {row.note}" for row in bench.rows if row.tokens_s is None])
