"""InfiniteBench's retrieval tasks (Zhang et al. 2024, arXiv:2402.13718) for any tokenizer and length.

Its rows and templates, with fewer noise lines or pairs if the length is below its 90k to 122k tokens, and its
completion prefixes, which models without instruction tuning need. Made from the description, not from its files.
"""

import random
import re
import uuid
from typing import Any

from turbo_hf.eval.ruler import NOISE, Question, within

HIDDEN = (
    "There is an important info hidden inside a lot of irrelevant text. Find it{also}. I will quiz you about the "
    "important information there.\n\n{context}\n\n{question} {prefix}"
)
PAIRS = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{context}\n\n"
ASKED = 'Key: "{key}"\nThe value associated with the specified key is: '

REPLIES = {"passkey": 6, "number_string": 12, "kv_retrieval": 50}
"""Tokens of a reply, of the models that it was made with; tokenizers that split more get more (`reply_tokens`)."""

DIGITS = re.compile(r"\d+")


def reply_tokens(task: str, tokenizer: Any) -> int:
    """Room for an answer in this tokenizer, and no less than InfiniteBench gives."""
    longest = {"passkey": " 71432", "number_string": " 7714433200", "kv_retrieval": str(uuid.UUID(int=(1 << 128) - 3))}
    return max(REPLIES[task], 4 + len(tokenizer(longest[task], add_special_tokens=False).input_ids))


def questions(task: str, tokenizer: Any, length: int, count: int, seed: int = 42) -> list[Question]:
    """`count` questions of "passkey", "number_string" or "kv_retrieval", depths evenly spread, of `length` tokens.

    Raises:
        ValueError: an unknown task, or a length without room for the smallest question.
    """
    if task not in REPLIES:
        raise ValueError(f"unknown InfiniteBench task {task}; tasks are {', '.join(REPLIES)}.")
    room = length - reply_tokens(task, tokenizer)

    def make(units: int, at: int) -> Question:
        depth = at / max(1, count - 1)
        return _question(task, units, depth, random.Random(f"{seed} {task} {length} {at}"), length)

    def tokens(units: int, at: int) -> int:
        return len(tokenizer(make(units, at).prompt).input_ids)

    small, large = tokens(1, 0), tokens(9, 0)
    if small > room:
        raise ValueError(f"{task} has no room in {length} tokens: the smallest question takes {small}.")
    # noise lines and pairs take about the same tokens each
    guess = max(1, (room - small) * 8 // (large - small))
    return within(make, tokenizer, room, guess, 1, count)


def _question(task: str, units: int, depth: float, rng: random.Random, length: int) -> Question:
    at = round(depth * units)
    if task == "kv_retrieval":
        names = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2 * units)]
        pairs = list(zip(names[::2], names[1::2], strict=True))
        key, value = pairs[min(at, units - 1)]
        context = "{" + ", ".join(f'"{k}": "{v}"' for k, v in pairs) + "}"
        return Question(PAIRS.format(context=context) + ASKED.format(key=key), [value], length, depth)
    digits = [str(rng.randrange(10)) for _ in range(5)]
    if task == "number_string":
        for _ in range(5):
            twice = rng.randrange(len(digits))
            digits.insert(twice, digits[twice])
    key = "".join(digits)
    name = "pass key" if task == "passkey" else "sequence of digits"
    fact = f"The {name} is {key}. Remember it. {key} is the {name}.\n"
    lines = [NOISE + "\n"] * units
    lines.insert(at, fact)
    also = " and memorize them" if task == "passkey" else ""
    prompt = HIDDEN.format(also=also, context="".join(lines), question=f"What is the {name}?", prefix=f"The {name} is")
    return Question(prompt, [key], length, depth)


def right(task: str, answer: str, reply: str) -> bool:
    """InfiniteBench's verdict: the first run of digits is the key; for pairs, a word of the reply is the value."""
    if task == "kv_retrieval":
        return answer in re.split(r"[\s\"'{}:,.]+", reply)
    return DIGITS.findall(reply)[:1] == [answer]
