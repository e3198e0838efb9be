"""Run a suite through lm-evaluation-harness: each method in turn, with each item stored as soon as it is answered."""

import json
import logging
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.config.whole_files import write_whole
from turbo_hf.eval.answers import AnsweredLM, Answers, Batch
from turbo_hf.eval.methods import AGAIN, BASELINE, Method, folder_of, without_plans
from turbo_hf.eval.model import TurboLM
from turbo_hf.eval.suites import Limits
from turbo_hf.eval.tasks import Spec

SEED = 1234
"""Seed of few-shot samplers and torch; decoding is greedy."""

TOGETHER = 256
"""Prompts tokenized per call: more would only take memory."""

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


def load_tasks(specs: list[Spec], tokenizer: Any, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """The harness' tasks with their requests built, by name, and a note for each that does not fit the model.

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
        longest = _longest(task, tokenizer)
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


def _longest(task: Any, tokenizer: Any) -> int:
    """Tokens of the longest prompt with its reply; 0 where text is read in windows."""
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return 0
    replied = task.OUTPUT_TYPE == "generate_until"
    longest = 0
    for at in range(0, len(task.instances), TOGETHER):
        part = [r.args for r in task.instances[at : at + TOGETHER]]
        ids = tokenizer([prompt if replied else prompt + end for prompt, end in part]).input_ids
        # 256 is what HFLM generates where a task does not say
        rooms = [int(given.get("max_gen_toks") or 256) if replied else 0 for _, given in part]
        longest = max(longest, *(len(own) + room for own, room in zip(ids, rooms, strict=True)))
    return longest


def answers_of(label: str, method: Method, folder: Path, about: dict[str, Any]) -> Answers:
    """What an earlier run of a method has answered; arguments as of `run_method`.

    about: the identity of the run.

    Raises:
        ValueError: the answers are of another run, or were changed; the message names the file.
    """
    options = None if method.config is None else method.config.to_dict()
    return Answers(folder / folder_of(label) / "answers.jsonl", {**about, "method": label, "config": options})


def run_method(
    label: str,
    method: Method,
    model: Any,
    tokenizer: Any,
    tasks: dict[str, Any],
    folder: Path,
    answers: Answers,
    *,
    batch: int,
    batch_tokens: int | None = None,
    limits: Limits,
    calibration: Calibration | None = None,
) -> Outcome:
    """Run one method on every task; what an earlier run of it has answered is not asked again.

    Args:
        label: its name in the table and of its folder. method: what the model is patched with.
        model: the loaded model. tokenizer: its own, which pads on the left.
        tasks: from `load_tasks`.
        folder: folder of the whole run. Below `folder/label`: answers.jsonl (as they come), and, when all is done,
            samples_TASK.jsonl and results.json.
        answers: from `answers_of`.
        batch: maximum rows per batch. batch_tokens: maximum tokens per batch; None: no limit.
        limits: what the tasks were built with.
        calibration: for methods that need one.

    Raises:
        ValueError: the answers of an earlier run were changed; the message names the file.
        OSError: a file cannot be written.
    """
    own = folder / folder_of(label)
    torch.manual_seed(SEED)
    if label == AGAIN:
        # of the same batches nothing would differ: other sums, as any change of the batch size makes
        batch, batch_tokens = max(1, batch * 5 // 8), batch_tokens and max(1, batch_tokens * 5 // 8)
    lm = TurboLM(
        model, preset=method, calibration=calibration, tokenizer=tokenizer, batch_size=batch,
        batch_tokens=batch_tokens, max_length=limits.context, on_batch=answers.keep,
    )  # fmt: skip
    with closing(lm), without_plans():
        found = evaluate(
            lm=AnsweredLM(lm, answers),
            task_dict={"tasks": tasks},
            limit=limits.limit,
            bootstrap_iters=1000,  # for the standard error of a perplexity
            log_samples=True,
        )
    logged = found.pop("samples")
    samples = {task: [_lean(row, with_prompt=label == BASELINE) for row in logged[task]] for task in tasks}
    for task, rows in samples.items():
        write_whole(own / f"samples_{task}.jsonl", "".join(json.dumps(row, default=str) + "\n" for row in rows))
    write_whole(own / "results.json", json.dumps(found, default=str, indent=1))
    return Outcome(found, samples, answers.batches)


def _lean(sample: dict[str, Any], *, with_prompt: bool) -> dict[str, Any]:
    """The sample with its prompt once, or not at all: long ones, several times a method, would be all that is kept.

    The baseline's samples have them; `prompt_hash` tells that another method had the same.
    """
    doc = sample["doc"]
    if "prompt" not in doc:
        return sample
    kept = doc if with_prompt else {key: value for key, value in doc.items() if key != "prompt"}
    return {**sample, "doc": kept, "arguments": [args[1:] for args in sample["arguments"]]}
