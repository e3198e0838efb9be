"""Needles in a haystack: seeded prompts with one fact hidden in prose, and whether an answer names it.

The form is RULER's single needle (a key of two words, a value of seven digits, the answer begun for the model); the
prose is from Walden by Henry David Thoreau (1854, public domain), included in the package.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from typing import Any

INTRO = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
ADJECTIVES = ("quiet", "golden", "humble", "rapid", "ancient", "gentle", "bright", "hollow", "frozen", "curious")
NOUNS = ("river", "lantern", "meadow", "harbor", "engine", "garden", "bridge", "copper", "planet", "window")


@dataclass(frozen=True, slots=True)
class Needle:
    """One prompt. depth: position of the needle, 0 (start) to 1 (end); tokens: the prompt's length."""

    prompt: str
    answer: str
    depth: float
    tokens: int

    def found_in(self, reply: str) -> bool:
        """Whether the reply names the hidden number."""
        return self.answer in reply


def needles(tokenizer: Any, count: int, shortest: int, longest: int, seed: int = 0) -> list[Needle]:
    """`count` prompts whose lengths run evenly from `shortest` to `longest` tokens, shuffled; one alone has `longest`.

    Args:
        tokenizer: of the model that will read them.
        count: how many.
        shortest, longest: tokens of a prompt, at most; the text stops at the last whole sentence that fits.
        seed: same seed, same tokenizer: same prompts.

    Raises:
        ValueError: no room for the question in the shortest prompt.
    """
    rng = random.Random(seed)
    sentences, sizes = _haystack(tokenizer)
    steps = (1,) if count == 1 else range(count)
    lengths = [shortest + (longest - shortest) * i // max(1, count - 1) for i in steps]
    rng.shuffle(lengths)
    return [_needle(tokenizer, sentences, sizes, length, rng) for length in lengths]


def needle_grid(
    tokenizer: Any, lengths: Sequence[int], depths: Sequence[float], seeds: Sequence[int]
) -> list[tuple[int, int, Needle]]:
    """(length asked for, seed, prompt) of every length, depth and seed: the cells of a heat map.

    Args:
        tokenizer: of the model that will read them.
        lengths: tokens of a prompt, at most.
        depths: positions of the needle, 0 to 1.
        seeds: of key, number and prose; each fills every cell once.

    Raises:
        ValueError: a length without room for the question.
    """
    sentences, sizes = _haystack(tokenizer)
    return [
        (length, seed, _needle(tokenizer, sentences, sizes, length, random.Random(f"{seed} {length} {depth}"), depth))
        for length in lengths
        for depth in depths
        for seed in seeds
    ]


def prose(start: int, count: int) -> str:
    """`count` sentences of the included prose, from sentence `start` on."""
    sentences = carried_sentences()
    return " ".join(sentences[(start + i) % len(sentences)] for i in range(count))


def carried_sentences() -> list[str]:
    """Sentences of the prose included in the package, in order."""
    return resources.files("turbo_hf.eval").joinpath("haystack.txt").read_text("utf-8").splitlines()


def _haystack(tokenizer: Any) -> tuple[list[str], list[int]]:
    """The sentences of the included prose, and the number of tokens of each."""
    sentences = carried_sentences()
    return sentences, [len(ids) for ids in tokenizer([" " + s for s in sentences], add_special_tokens=False).input_ids]


def _needle(
    tokenizer: Any,
    sentences: list[str],
    sizes: list[int],
    length: int,
    rng: random.Random,
    depth: float | None = None,
) -> Needle:
    key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    answer = str(rng.randrange(1_000_000, 10_000_000))
    fact, question = NEEDLE.format(key=key, value=answer), QUESTION.format(key=key)
    frame = len(tokenizer(INTRO + fact + question).input_ids)
    if frame > length:
        raise ValueError(f"a prompt of {length} tokens has no room for the question, which takes {frame}.")
    first = rng.randrange(len(sentences))
    order = [(first + i) % len(sentences) for i in range(len(sentences))]
    rounds = 1 + (length - frame) // sum(sizes)
    order = order * rounds
    ends = accumulate(sizes[i] for i in order)
    text = [sentences[i] for i, end in zip(order, ends, strict=True) if end <= length - frame]
    depth = rng.random() if depth is None else depth
    text.insert(round(depth * len(text)), fact)
    prompt = INTRO + " ".join(text) + question
    return Needle(prompt, answer, depth, len(tokenizer(prompt).input_ids))
