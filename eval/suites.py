"""The tasks of each suite, read from local files or from the Hub."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbo_hf.eval import tasks
from turbo_hf.eval.long_answers import ROWS
from turbo_hf.eval.scorers import BBH, CHOICES, GSM8K, Scorer
from turbo_hf.eval.tasks import Spec

SUITES = {
    "smoke": "minutes on a CPU: needles, and perplexity of carried prose",
    "core": "GSM8K and BBH with chains of thought, AQuA, needles, WikiText",
    "reasoning": "GSM8K, BBH and AQuA only: decode-heavy, short prompts",
    "long": "to the longest context: needles at every depth, perplexity of windows",
    "answers": "tables written in another form, row by row: answers of 2k tokens and more",
}

BBH_TASKS = (
    "boolean_expressions", "causal_judgement", "date_understanding", "disambiguation_qa", "dyck_languages",
    "formal_fallacies", "geometric_shapes", "hyperbaton", "logical_deduction_five_objects",
    "logical_deduction_seven_objects", "logical_deduction_three_objects", "movie_recommendation",
    "multistep_arithmetic_two", "navigate", "object_counting", "penguins_in_a_table",
    "reasoning_about_colored_objects", "ruin_names", "salient_translation_error_detection", "snarks",
    "sports_understanding", "temporal_sequences", "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects", "tracking_shuffled_objects_three_objects", "web_of_lies",
    "word_sorting",
)  # fmt: skip

# least memorised by models, of the books in the data folder
BOOKS = ("travels_in_west_africa", "wieland", "waverley", "life_on_the_mississippi")

AQUA_FILES = ("aqua/cot_4shot.json", "aqua/test.jsonl")

DEPTHS = [i / 10 for i in range(11)]

LONG_ITEMS = 64
"""Items of each form of long answers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a suite is run.

    context: tokens that the model has positions for.
    longest: tokens of the longest prompt, as asked.
    limit: items per task; None: all.
    shortest: tokens of the shortest item, where its length can be chosen.
    only: tasks, of those that the suite has; empty: all.
    """

    context: int
    longest: int
    limit: int | None = None
    shortest: int = 0
    only: tuple[str, ...] = ()


def build(suite: str, tokenizer: Any, limits: Limits, data: Path | None = None) -> tuple[list[Spec], list[str]]:
    """The tasks of a suite, and a note for each thing that was left out.

    Args:
        suite: one of `SUITES`.
        tokenizer: the model's tokenizer.
        limits: what fits, and what was asked for.
        data: a folder laid out as the README says; None: stock tasks come from the Hub.

    Raises:
        ValueError: a file that is missing, or no task left.
    """
    if data is not None and not data.is_dir():
        raise ValueError(f"expected the data folder at {data}; there is none. Leave --data out to use the Hub.")
    specs: list[Spec] = []
    notes: list[str] = []
    if suite in ("core", "reasoning"):
        specs += _reasoning(data, limits.limit, notes)
    if suite == "core":
        specs.append(_wikitext(data))
    specs += [tasks.long_task(form, LONG_ITEMS, limits.limit) for form in ROWS if suite == "answers"]
    if suite not in ("reasoning", "answers"):
        specs += _needles(suite, tokenizer, limits, notes)
    if suite == "smoke":
        specs.append(tasks.prose_task("prose", tasks.carried_prose(2, 80)))
    if suite == "long":
        specs += _long_prose(data, limits)
    return _only(specs, suite, limits.only, notes), notes


def _only(specs: list[Spec], suite: str, wanted: tuple[str, ...], notes: list[str]) -> list[Spec]:
    there = [spec.name for spec in specs]
    strange = [name for name in wanted if name not in there]
    if strange:
        message = " ".join([f"no task {', '.join(strange)} here; {suite} has {', '.join(there) or 'none'}.", *notes])
        raise ValueError(message)
    return [spec for spec in specs if not wanted or spec.name in wanted]


def _bounds(limits: Limits) -> str:
    """The requested lengths, for notes."""
    least = f"--shortest {limits.shortest}, " if limits.shortest else ""
    return f"{least}--longest {limits.longest}, {limits.context} positions"


def _needles(suite: str, tokenizer: Any, limits: Limits, notes: list[str]) -> list[Spec]:
    lengths = {"smoke": [512, 1024], "core": [1024, 2048, 4096]}.get(suite)
    # of a context that is no power of two, its end as well
    lengths = lengths or list(dict.fromkeys((*_doubled(1024, limits), limits.longest)))
    depths, seeds = (DEPTHS[::5], range(2)) if suite == "smoke" else (DEPTHS, range(1 if suite == "core" else 5))
    fit = [
        length for length in lengths if limits.shortest <= length <= min(limits.longest, limits.context - tasks.REPLY)
    ]
    left = sorted(set(lengths) - set(fit))
    if left:
        notes.append(f"needle: lengths {', '.join(map(str, left))} left out ({_bounds(limits)}).")
    return [tasks.needle_task(tokenizer, fit, depths, list(seeds), limits.limit)] if fit else []


def _doubled(first: int, limits: Limits) -> list[int]:
    """Lengths from `first` on, each twice the one before, within what was asked for."""
    return [first * 2**i for i in range(16) if limits.shortest <= first * 2**i <= limits.longest]


def _reasoning(data: Path | None, limit: int | None, notes: list[str]) -> list[Spec]:
    specs = [_stock("gsm8k_cot", data, "gsm8k/test.jsonl", GSM8K)]
    specs += [_stock(f"bbh_cot_fewshot_{name}", data, f"bbh/{name}.json", BBH, field="examples") for name in BBH_TASKS]
    if data is not None:
        for file in AQUA_FILES:
            _expect(data, file)
        return [*specs, tasks.aqua_cot(data / "aqua", limit)]
    notes.append("AQuA by log-likelihood of its options; its chain of thought needs the exemplars of --data.")
    return [*specs, Spec("agieval_aqua_rat", "agieval_aqua_rat", CHOICES, AQUA_FILES)]


def _wikitext(data: Path | None) -> Spec:
    spec = _stock("wikitext", data, "wikitext2/test_documents.jsonl")
    if isinstance(spec.config, dict):
        spec.config.update({"training_split": None, "validation_split": None})
    return spec


def _long_prose(data: Path | None, limits: Limits) -> list[Spec]:
    if data is None:
        return [tasks.prose_task("prose", tasks.carried_prose(1, 163))]
    # four characters a token, about: one window of the longest context
    size = 4 * min(limits.longest, limits.context)
    books = [_expect(data, f"books/{name}.txt").read_text("utf-8")[:size] for name in BOOKS]
    wiki = _expect(data, "wikitext2/test_documents.jsonl").read_text("utf-8").splitlines()
    articles = "".join(json.loads(line)["page"] for line in wiki)
    windows = [articles[at : at + size] for at in range(0, len(articles) - size, size)][:4] or [articles]
    return [tasks.prose_task("books", books), tasks.prose_task("wikitext_long", windows)]


def _stock(task: str, data: Path | None, file: str, scorers: tuple[Scorer, ...] = (), **reading: str) -> Spec:
    """A task of the harness: by name, or the same with its rows from a local file."""
    if data is None:
        return Spec(task, task, scorers, (file,))
    kwargs = {"data_files": {"test": str(_expect(data, file))}, **reading}
    config = {"task": task, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": kwargs}
    return Spec(task, config, scorers)


def _expect(data: Path, file: str) -> Path:
    path = (data / file).resolve()
    if not path.is_file():
        raise ValueError(f"expected {file} in the data folder {data}; it is not there.")
    return path
