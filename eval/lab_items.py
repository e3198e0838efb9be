"""The lab models' task sets: a folder with one JSONL file per family.

A line has `prompt`, or `parts` that an excerpt and seeded generators fill in, and `answer`.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

ANSWER = re.compile(r"(?:So the answer is|The answer is|####) ?(.+?)(?:\.(?:\s|$)|\n|$)")


def right_answer(doc: dict[str, Any], reply: str) -> bool:
    """Whether the reply gives the answer: at the end of its chain of thought, or where it begins."""
    if not doc["chain"]:
        return reply.strip().startswith(doc["answer"])
    found = ANSWER.findall(reply.split("\n\n", maxsplit=1)[0])
    return bool(found) and str(found[0]).strip() == doc["answer"]


def lab_families(folder: Path, tokenizer: Any, longest: int, shortest: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Items of each family from `shortest` to `longest` tokens: prompt, answer, chain (the answer comes at the end of a
    chain of thought), length, and the tokens that a reply may take.

    Raises:
        ValueError: the folder is no such set.
    """
    missing = [name for name in ("haystack.txt", "words.json") if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"expected {missing[0]} and one JSONL file per family in {folder}; pass --data with lab_tasks/."
        )
    excerpt = (folder / "haystack.txt").read_text("utf-8")
    words = json.loads((folder / "words.json").read_text("utf-8"))
    families: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            raw = json.loads(line)
            if not shortest <= raw["length"] <= longest:
                continue
            prompt = raw.get("prompt") or "".join(_part(part, excerpt, words) for part in raw["parts"])
            # a quarter more than the model was trained to say, so that a reply is never cut short of its answer
            room = 8 + len(tokenizer(raw["completion"]).input_ids) * 5 // 4
            doc = {"prompt": prompt, "answer": raw["answer"], "chain": raw["kind"] == "cot"}
            families.setdefault(path.stem, []).append({**doc, "length": raw["length"], "room": room})
    return families


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
