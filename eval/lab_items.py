"""Items of the lab models' task sets.

A folder holds one JSONL file per family: `prompt`, or `parts` that an excerpt and seeded generators fill in, and
`answer`.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER = re.compile(r"(?:So the answer is|The answer is|####) ?(.+?)(?:\.(?:\s|$)|\n|$)")


@dataclass(frozen=True, slots=True)
class Item:
    """One question. chain: the answer comes at the end of a chain of thought; otherwise the reply begins with it."""

    task: str
    prompt: str
    answer: str
    chain: bool
    length: int
    new_tokens: int

    def right(self, reply: str) -> bool:
        """Whether the reply gives the answer."""
        if not self.chain:
            return reply.strip().startswith(self.answer)
        found = ANSWER.findall(reply.split("\n\n", maxsplit=1)[0])
        return bool(found) and str(found[0]).strip() == self.answer


def load_items(folder: Path, tokenizer: Any, longest: int, shortest: int = 0) -> list[Item]:
    """Every item of every family from `shortest` to `longest` tokens."""
    excerpt = (folder / "haystack.txt").read_text("utf-8")
    words = json.loads((folder / "words.json").read_text("utf-8"))
    items = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            raw = json.loads(line)
            if not shortest <= raw["length"] <= longest:
                continue
            prompt = raw.get("prompt") or "".join(_part(part, excerpt, words) for part in raw["parts"])
            # a quarter more than the model was trained to say, so that a reply is never cut short of its answer
            limit = 8 + len(tokenizer(raw["completion"]).input_ids) * 5 // 4
            items.append(Item(path.stem, prompt, raw["answer"], raw["kind"] == "cot", raw["length"], limit))
    return items


def _part(part: Any, excerpt: str, words: list[list[str]]) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part[0], int):
        return excerpt[part[0] : part[1]]
    if part[0] == "kv":
        pairs = ", ".join(f'"{key}": "{value}"' for key, value in _pairs(*part[1:]))
        return "{" + pairs + "}"
    if part[0] == "needles":
        keys = _keys(part[1], part[2], words)
        return "".join(f"\nOne of the special magic numbers for {key} is: {value}." for key, value in keys)
    return str(part[0]) * int(part[1])


def _pairs(kind: str, seed: int, count: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)

    def one() -> str:
        h = f"{rng.getrandbits(128):032x}"
        variant = "89ab"[int(h[16], 16) & 3]
        return h[:8] if kind == "hex" else f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{variant}{h[17:20]}-{h[20:]}"

    return [(one(), one()) for _ in range(count)]


def _keys(seed: int, count: int, words: list[list[str]]) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        key = "-".join(group[int(rng.random() * len(group))] for group in words[:2])
        found.setdefault(key, str(1000000 + int(rng.random() * 9000000)))
    return list(found.items())
