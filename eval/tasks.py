"""Tasks made here, as task configs for the harness: needles by depth, prose, AQuA with chain of thought."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbo_hf.eval.long_answers import NEW_TOKENS, long_answers, right_rows
from turbo_hf.eval.needle import needle_grid, prose
from turbo_hf.eval.scorers import LONG, OWN, Scorer, right_choice

REPLY = 32
"""Tokens of a reply to a needle: a number of seven digits, and room around it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One task of a suite: what the harness loads it from, and how its items are judged (empty: by perplexity).

    local: of a task that comes from the Hub, the files of a data folder that would do instead.
    """

    name: str
    config: str | dict[str, Any]
    scorers: tuple[Scorer, ...] = ()
    local: tuple[str, ...] = ()


def evenly(items: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` of the items, spread over all of them: lengths and depths keep their range."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def _task(
    name: str, docs: list[dict[str, Any]], kind: str, metrics: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A task of the harness over `docs`."""

    def rows(**_: Any) -> dict[str, Any]:
        from datasets import Dataset  # noqa: PLC0415  an extra: only evaluations need it

        return {"test": Dataset.from_list(docs)}

    about = {"task": name, "custom_dataset": rows, "test_split": "test", "output_type": kind, "num_fewshot": 0}
    return {**about, "metric_list": metrics, "metadata": {"version": 1.0}, **more}


def _own_task(name: str, docs: list[dict[str, Any]], judge: Any, until: list[str], new_tokens: int) -> dict[str, Any]:
    """A generate_until task over `docs`, which have "prompt" and "answer"; `judge(doc, reply)` says what is right."""

    def verdict(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        return {"right": float(judge(doc, results[0]))}

    return _task(
        name,
        docs,
        "generate_until",
        [{"metric": "right", "aggregation": "mean", "higher_is_better": True}],
        doc_to_text="prompt",
        doc_to_target="answer",
        target_delimiter="",
        generation_kwargs={"until": until, "max_gen_toks": new_tokens, "do_sample": False},
        process_results=verdict,
    )


def needle_task(
    tokenizer: Any, lengths: Sequence[int], depths: Sequence[float], seeds: Sequence[int], limit: int | None = None
) -> Spec:
    """RULER's single needle in prose; each item keeps its length, depth and seed. Right: the reply holds the number."""
    docs = [
        {"prompt": n.prompt, "answer": n.answer, "length": length, "depth": n.depth, "seed": seed, "tokens": n.tokens}
        for length, seed, n in evenly(needle_grid(tokenizer, lengths, depths, seeds), limit)
    ]
    return Spec("needle", _own_task("needle", docs, lambda doc, reply: doc["answer"] in reply, [], REPLY), OWN)


def long_task(form: str, count: int, limit: int | None = None) -> Spec:
    """Long answers of one form."""
    judge = lambda doc, reply: all(right_rows(doc["rows"], reply))  # noqa: E731
    docs = evenly(long_answers(form, count), limit)
    return Spec(f"long_{form}", _own_task(f"long_{form}", docs, judge, ["\n\n", "```"], NEW_TOKENS), LONG)


def prose_task(name: str, texts: list[str]) -> Spec:
    """Perplexity of texts, each read in windows of the model's whole context."""
    metrics = [
        {"metric": f"{unit}_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
        for unit in ("word", "byte")
    ]
    docs = [{"text": text} for text in texts]
    return Spec(name, _task(name, docs, "loglikelihood_rolling", metrics, doc_to_text="", doc_to_target="text"))


def carried_prose(texts: int, sentences: int) -> list[str]:
    """Texts of `sentences` sentences each from the prose that the package carries."""
    return [prose(i * sentences, sentences) for i in range(texts)]


AQUA = "Q: {question} Answer Choices: {choices}\nA:"


def aqua_cot(folder: Path, limit: int | None = None) -> Spec:
    """AQuA-RAT with four exemplars of a chain of thought (Wang et al. 2022, self-consistency), from `folder`."""
    shots = json.loads((folder / "cot_4shot.json").read_text("utf-8"))
    head = "\n\n".join(
        f"{_aqua(shot)} {shot['rationale']} The answer is ({shot['correct'].lower()})." for shot in shots
    )
    raw = [json.loads(line) for line in (folder / "test.jsonl").read_text("utf-8").splitlines()]
    docs = [
        {"prompt": f"{head}\n\n{_aqua(row)}", "answer": f"({row['correct'].lower()})"} for row in evenly(raw, limit)
    ]
    judge = lambda doc, reply: right_choice({"resps": [[reply]], "target": doc["answer"]})  # noqa: E731
    return Spec("aqua_cot", _own_task("aqua_cot", docs, judge, ["Q:", "\n\n"], 512), OWN)


def _aqua(row: dict[str, Any]) -> str:
    texts = [option.split(")", 1)[-1].strip() if option[1:2] == ")" else option for option in row["options"]]
    choices = " ".join(f"({letter}) {text}" for letter, text in zip("abcde", texts, strict=True))
    return AQUA.format(question=row["question"], choices=choices)
