"""Run a suite through lm-evaluation-harness: each method in turn, with each item stored as soon as it is answered."""

import json
import logging
from contextlib import closing
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.config.whole_files import append_line, read_lines, read_object, write_whole
from turbo_hf.eval.answers import AnsweredLM, Answers
from turbo_hf.eval.methods import AGAIN, BASELINE, folder_of
from turbo_hf.eval.model import Batch, TurboLM
from turbo_hf.eval.suites import Limits
from turbo_hf.eval.tasks import Spec
from turbo_hf.eval.token_cache import Prompts
from turbo_hf.eval.without_cudnn_plans import without_plans

SEED = 1234
"""Seed of few-shot samplers and torch; decoding is greedy."""

BOOTSTRAP = 1000
"""Resamples for the standard error of a perplexity."""

Samples = dict[str, list[dict[str, Any]]]
"""The harness's logged samples, by task."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One method's run: results in the harness' schema, its samples, and what generation took."""

    results: dict[str, Any]
    samples: Samples
    batches: list[Batch]


def quiet() -> None:
    """No harness chatter; its progress bars stay."""
    for name in ("lm_eval", "datasets", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def load_tasks(specs: list[Spec], prompts: Prompts, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """The harness' tasks with their requests built, by name, and a note for each that does not fit the model.

    `prompts` has their tokens then.

    Raises:
        ValueError: no task is left, or the Hub does not give one; the message names the local files that would do.
    """
    # the whole index of stock tasks takes seconds to read: only where one is named
    stock = any(not (isinstance(s.config, dict) and "custom_dataset" in s.config) for s in specs)
    manager = TaskManager(include_defaults=stock)
    tasks: dict[str, Any] = {}
    notes = []
    for spec in specs:
        # the harness fills what a stock task's override leaves out only inside a group
        local = isinstance(spec.config, dict) and "custom_dataset" not in spec.config
        wanted = {"group": "local", "task": [spec.config]} if local else spec.config
        try:
            (task,) = manager.load([wanted])["tasks"].values()
        except OSError as error:
            if not spec.local:
                raise
            files = " and ".join(f"DIR/{file}" for file in spec.local)
            raise ValueError(f"{spec.name}: {error}. Without the Hub: --data DIR, with {files}.") from error
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
        task.build_all_requests(limit=limits.limit, rank=0, world_size=1)
        longest = _longest(task, prompts)
        if longest > limits.context:
            notes.append(
                f"{spec.name}: skipped; it takes {longest} tokens, there is room for {limits.context} "
                "(--longest, or the model's positions)."
            )
        else:
            tasks[spec.name] = task
    if not tasks:
        raise ValueError(f"no task of this suite is left to run. {' '.join(notes)}")
    return tasks, notes


def _longest(task: Any, prompts: Prompts) -> int:
    """Tokens of the longest prompt with its reply; 0 where text is read in windows."""
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return 0
    requests = [r.args for r in task.instances]
    if task.OUTPUT_TYPE == "generate_until":
        lengths = list(map(len, prompts.ids([prompt for prompt, _ in requests])))
        # 256 is what HFLM generates where a task does not say
        rooms = [int(given.get("max_gen_toks") or 256) for _, given in requests]
        return max(length + room for length, room in zip(lengths, rooms, strict=True))
    return max(len(ids) for ids in prompts.tokenizer([prompt + end for prompt, end in requests]).input_ids)


def run_method(
    label: str,
    method: str,
    model: Any,
    prompts: Prompts,
    tasks: dict[str, Any],
    folder: Path,
    *,
    batch: int,
    batch_tokens: int | None = None,
    limits: Limits,
    calibration: Calibration | None = None,
) -> Outcome:
    """Run one method on every task, or read what an earlier run of it left.

    Args:
        label: its name in the table and of its folder. method: what the model is patched with.
        model: the loaded model. prompts: of its tokenizer, which pads on the left.
        tasks: from `load_tasks`.
        folder: folder of the whole run. Below `folder/label`: answers.jsonl (as they come), batches.jsonl, and, when
            all is done, samples_TASK.jsonl and results.json.
        batch: maximum rows per batch. batch_tokens: maximum tokens per batch; None: no limit.
        limits: what the tasks were built with.
        calibration: for methods that need one.

    Raises:
        ValueError: a file of an earlier run is torn or was changed; the message names it and says what to do.
        OSError: a file cannot be written.
    """
    own = folder / folder_of(label)
    own.mkdir(parents=True, exist_ok=True)
    if not (own / "results.json").is_file():
        torch.manual_seed(SEED)
        answers = Answers(own / "answers.jsonl")
        if label == AGAIN:
            # of the same batches nothing would differ: other sums, as any change of the batch size makes
            batch, batch_tokens = max(1, batch * 5 // 8), batch_tokens and max(1, batch_tokens * 5 // 8)

        def keep(taken: Batch) -> None:
            append_line(own / "batches.jsonl", asdict(taken))

        with (
            closing(
                TurboLM(
                    model,
                    preset=method,
                    calibration=calibration,
                    tokenizer=prompts.tokenizer,
                    prompts=prompts,
                    batch_size=batch,
                    batch_tokens=batch_tokens,
                    max_length=limits.context,
                    on_batch=keep,
                )
            ) as lm,
            without_plans(),
        ):
            found = evaluate(
                lm=AnsweredLM(lm, answers),
                task_dict={"tasks": tasks},
                limit=limits.limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=True,
            )
        samples: Samples = found.pop("samples")
        for task, rows in samples.items():
            lean = [_lean(row, with_prompt=label == BASELINE) for row in rows]
            write_whole(own / f"samples_{task}.jsonl", "".join(json.dumps(row, default=str) + "\n" for row in lean))
        # last: its presence means that everything above is there
        write_whole(own / "results.json", json.dumps(found, default=str, indent=1))
    return _read(own, list(tasks))


def _lean(sample: dict[str, Any], *, with_prompt: bool) -> dict[str, Any]:
    """The sample with its prompt once, or not at all: long ones, several times a method, would be all that is kept.

    The baseline's samples have them; `prompt_hash` tells that another method had the same.
    """
    doc = sample["doc"]
    if "prompt" not in doc:
        return sample
    kept = doc if with_prompt else {key: value for key, value in doc.items() if key != "prompt"}
    return {**sample, "doc": kept, "arguments": [args[1:] for args in sample["arguments"]]}


def _read(own: Path, tasks: list[str]) -> Outcome:
    results = own / "results.json"
    remedy = f"Delete {str(results)!r}, and the same command writes it and all samples anew from the answers beside it."
    samples = {}
    for task in tasks:
        path = own / f"samples_{task}.jsonl"
        if not path.is_file():
            raise ValueError(f"{str(path)!r} is missing. {remedy}")
        samples[task] = read_lines(path, remedy)
    found = read_object(results, remedy)
    _require_all_items(found, samples, own, remedy)
    log, anew = own / "batches.jsonl", f"Delete {str(own)!r}, and the same command asks its items anew."
    try:
        batches = [Batch(**line) for line in read_lines(log, anew, growing=True)]
        for batch in batches:
            numbers = (*astuple(batch)[:-1], *(batch.keys or ()))
            if not all(isinstance(number, float | int) for number in numbers):
                raise TypeError(f"{batch} has fields that are no numbers")
    except TypeError as error:
        raise ValueError(f"{str(log)!r} was changed: {error}. {anew}") from error
    return Outcome(found, samples, batches)


def _require_all_items(found: dict[str, Any], samples: Samples, own: Path, remedy: str) -> None:
    """ValueError unless results have figures for each task, and samples are of as many items as they say."""
    for task, rows in samples.items():
        try:
            figures, count = dict(found["results"][task]), found["n-samples"][task]["effective"]
            for key, figure in figures.items():
                if key.endswith("perplexity,none") and not isinstance(figure, float | int):
                    raise TypeError(f"{key} is {figure!r}")
        except (KeyError, TypeError, ValueError) as error:
            place = str(own / "results.json")
            raise ValueError(f"{place!r} was changed: it has no figures of {task} ({error!r}). {remedy}") from error
        items = [row["doc_id"] for row in rows if isinstance(row.get("doc_id"), int)]
        if len(set(items)) != count or len(items) < len(rows):
            place = str(own / f"samples_{task}.jsonl")
            raise ValueError(f"{place!r} was changed: it has samples of {len(set(items))} items, not {count}. {remedy}")
