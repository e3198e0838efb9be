"""RULER's synthetic tasks (Hsieh et al. 2024, arXiv:2404.06654) for any tokenizer and length, with its parameters.

Made from the description of NVIDIA/RULER, not run through it: words and haystacks are of other sources, so that scores
stand beside each other and not beside published ones. Prompts are as long as fits: length less the reply's tokens.
"""

import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
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
TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assigned the value {value}, they are: "
)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)

DEPTHS = [round(100 * i / 39) for i in range(40)]
ZETA_2 = 1.6449340668482264
HOPS = 4


@dataclass(frozen=True, slots=True)
class Sources:
    """Where text comes from. essays: sentences of the haystack; words: distinct ones, for keys and lists."""

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

REPLIES = {**dict.fromkeys(NIAH_TASKS, 128), "vt": 30, "cwe": 120, "fwe": 50}
"""Tokens of a reply, by task: all eleven that need no data set of questions."""

Make = Callable[[int, random.Random], Question]
"""(units of haystack, random numbers) -> a question."""


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
        ValueError: an unknown task, a length without room for the smallest question, or too few words for the list.
    """
    if task not in REPLIES:
        raise ValueError(f"unknown RULER task {task}; tasks are {', '.join(REPLIES)}.")
    room = length - REPLIES[task]
    maker = _maker(task, length, text)

    def make(units: int, at: int) -> Question:
        return maker(units, random.Random(f"{seed} {task} {length} {at}"))

    def size(question: Question) -> int:
        return len(tokenizer(question.prompt).input_ids)

    least = HOPS + 1 if task == "vt" else 10 if task == "cwe" else 4
    smallest = size(make(least, 0))
    if smallest > room:
        raise ValueError(f"{task} has no room in {length} tokens: the smallest question takes {smallest}.")
    most = len(text.words) if task == "cwe" else length
    units = largest(lambda units: size(make(units, 0)) <= room, most, least, fineness=128)
    found = []
    for at in range(count):
        own, less = make(units, at), units
        # names and numbers take more tokens in some questions
        while size(own) > room and less > least:
            less = max(least, less - max(1, less // 64))
            own = make(less, at)
        found.append(own)
    return found


def _maker(task: str, length: int, text: Sources) -> Make:
    if task in NIAH_TASKS:
        return lambda units, rng: _needles(NIAH_TASKS[task], units, rng, length, text)
    if task == "vt":
        return lambda units, rng: _tracking(units, rng, length)
    if task == "cwe":
        return lambda units, rng: _common(units, rng, length, text)
    return lambda units, rng: _frequent(units, rng, length)


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


def _tracking(units: int, rng: random.Random, length: int) -> Question:
    example, names = _chain(8, rng, 3)
    own, asked = _chain(units, rng, 5)
    return Question(f"{example}{' '.join(names)}\n\n{own}", asked, length)


def _chain(units: int, rng: random.Random, letters: int) -> tuple[str, list[str]]:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = rng.randrange(10000, 99999)
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    text = [NOISE + "\n"] * units
    for moved, (place, line) in enumerate(zip(sorted(rng.sample(range(units), len(chain))), chain, strict=True)):
        text.insert(place + moved, line)
    context = " ".join(text).replace(". \n", ".\n")
    return TRACKING.format(context=context, value=value, count=len(names)), names


def _common(units: int, rng: random.Random, length: int, text: Sources) -> Question:
    # RULER's numbers, and its smaller ones for short contexts
    example, shots = _list(20, 3, 1, rng, text) if length < 4096 else _list(40, 10, 3, rng, text)
    own, asked = _list(units, 6, 1, rng, text) if length < 4096 else _list(units, 30, 3, rng, text)
    worked = f"{example} {' '.join(f'{i}. {word}' for i, word in enumerate(shots, 1))}"
    return Question(f"{worked}\n{own}", asked, length)


def _list(count: int, often: int, seldom: int, rng: random.Random, text: Sources) -> tuple[str, list[str]]:
    if count > len(text.words):
        raise ValueError(f"a list of {count} different words was asked for; the sources have {len(text.words)}.")
    chosen = rng.sample(text.words, count)
    words = chosen[:10] * often + chosen[10:] * seldom
    rng.shuffle(words)
    return COMMON.format(context=" ".join(f"{i}. {word}" for i, word in enumerate(words, 1))), chosen[:10]


def _frequent(units: int, rng: random.Random, length: int) -> Question:
    """Zipf's law, alpha 2: `units` words in all; the most frequent one is dots, and the next three are the answer."""
    size = max(4, length // 50)
    names: list[str] = []
    while len(names) < size:
        name = "".join(rng.choices(string.ascii_lowercase, k=6))
        if name not in names:
            names.append(name)
    names[0] = "..."
    text = [name for rank, name in enumerate(names, 1) for _ in range(int(units * rank**-2.0 / ZETA_2))]
    rng.shuffle(text)
    return Question(FREQUENT.format(context=" ".join(text)), names[1:4], length)
