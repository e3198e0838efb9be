"""RULER's needle tasks (Hsieh et al. 2024, arXiv:2404.06654) for any tokenizer and length, with its parameters.

Made from the description of NVIDIA/RULER, not run through it: words and haystacks are of other sources, so that scores
stand beside each other and not beside published ones. Prompts are as long as fits: length less the reply's tokens.
"""

import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbo_hf.eval.bench.shapes import largest
from turbo_hf.eval.needle import carried_sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text? The special magic {kind} for {query} mentioned in the provided text are"
)

DEPTHS = [round(100 * i / 39) for i in range(40)]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where text comes from. essays: sentences of the haystack; words: distinct ones, for keys."""

    essays: list[str]
    words: list[str]


@dataclass(frozen=True, slots=True)
class Question:
    """One item. answers: each must be in the reply. depth: of the asked needle (the first of several), or None."""

    prompt: str
    answers: list[str]
    length: int
    depth: float | None = None


@dataclass(frozen=True, slots=True)
class Niah:
    """One of RULER's eight needle tasks: haystack "noise", "essay" or "needle"; numbers of keys, values, queries."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH_TASKS = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
}

REPLY_TOKENS = 128
"""Of each task."""

LEAST = 4
"""Units of the smallest haystack."""


def sources(data: Path | None = None) -> Sources:
    """The essays of the data folder, where it has needle/essays, else the carried prose; words are those in them."""
    own = carried_sentences()
    essays = sorted((data / "needle" / "essays").glob("*.txt")) if data is not None else []
    if essays:
        text = " ".join(" ".join(path.read_text("utf-8") for path in essays).split())
        own = [part.strip().removesuffix(".") + "." for part in text.split(". ") if part.strip()]
    plain = (word.strip(".,;:!?\"'()").lower() for word in " ".join(own).split())
    return Sources(own, sorted({word for word in plain if word.isascii() and word.isalpha() and 4 <= len(word) <= 9}))


def questions(task: str, tokenizer: Any, length: int, count: int, text: Sources, seed: int = 42) -> list[Question]:
    """`count` questions of a task whose prompts and replies take at most `length` tokens.

    Raises:
        ValueError: an unknown task, or a length without room for the smallest question.
    """
    if task not in NIAH_TASKS:
        raise ValueError(f"unknown RULER task {task}; tasks are {', '.join(NIAH_TASKS)}.")

    def make(units: int, at: int) -> Question:
        return _needles(NIAH_TASKS[task], units, random.Random(f"{seed} {task} {length} {at}"), length, text)

    def fits(question: Question) -> bool:
        return len(tokenizer(question.prompt).input_ids) + REPLY_TOKENS <= length

    if not fits(make(LEAST, 0)):
        raise ValueError(f"{task} has no room in {length} tokens for its smallest question and reply.")
    units = largest(lambda units: fits(make(units, 0)), length, LEAST, fineness=128)
    found = []
    for at in range(count):
        own, less = make(units, at), units
        # names and numbers take more tokens in some questions
        while less > LEAST and not fits(own):
            less = max(LEAST, less - max(1, less // 64))
            own = make(less, at)
        found.append(own)
    return found


def _name(kind: str, rng: random.Random, text: Sources) -> str:
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(text.words)}-{rng.choice(text.words)}"


def _needles(task: Niah, units: int, rng: random.Random, length: int, source: Sources) -> Question:
    keys = [_name(task.key, rng, source) for _ in range(task.keys)]
    values = {key: [_name(task.value, rng, source) for _ in range(task.values)] for key in keys}
    facts = [NEEDLE.format(kind=task.value, key=key, value=value) for key in keys for value in values[key]]
    rng.shuffle(facts)
    if task.haystack == "essay":
        first = rng.randrange(len(source.essays))
        text = [source.essays[(first + i) % len(source.essays)] for i in range(units)]
        places = sorted(len(text) * depth // 100 for depth in rng.sample(DEPTHS, len(facts)))
    else:
        others = lambda: NEEDLE.format(  # noqa: E731
            kind=task.value, key=_name(task.key, rng, source), value=_name(task.value, rng, source)
        )
        text = [NOISE if task.haystack == "noise" else others() for _ in range(units)]
        places = sorted(rng.sample(range(units), len(facts)))
    for moved, (place, fact) in enumerate(zip(places, facts, strict=True)):
        text.insert(place + moved, fact)
    asked = rng.sample(keys, task.queries)
    depth = next(place for place, fact in zip(places, facts, strict=True) if f" {asked[0]} " in fact) / max(1, units)
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    template, kind = NIAH, task.value
    if task.queries * task.values == 1:
        template, kind = template.replace("Some", "A").replace("are all", "is").replace("are", "is"), kind[:-1]
    context = (" " if task.haystack == "essay" else "\n").join(text)
    prompt = template.format(kind=kind, context=context, query=query)
    return Question(prompt, [value for key in asked for value in values[key]], length, depth)
