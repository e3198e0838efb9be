"""Accuracy of the presets on the task sets of the lab models, paired with the unpatched model, which runs twice.

    python -m turbo_hf.eval.lab_tasks MODEL DATA --out results.json
    python -m turbo_hf.eval.lab_tasks MODEL DATA --out results.json --calibration DIR --shortest 7000 --longest 17000 \
        --method turbo4 --method turbo4@saap:probes=64 --method turbo4@window

DATA holds one JSONL file a family: `prompt`, or `parts` that an excerpt and seeded generators fill in, and `answer`.
"""

import json
import random
import re
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

from turbo_hf.config import PRESETS, TurboConfig
from turbo_hf.eval.methods import method_named
from turbo_hf.eval.paired import paired
from turbo_hf.eval.sdpa import without_plans
from turbo_hf.handle import Report
from turbo_hf.patching import patch

ANSWER = re.compile(r"(?:So the answer is|The answer is|####) ?(.+?)(?:\.(?:\s|$)|\n|$)")
BATCH_TOKENS = 1 << 17
"""Prompt tokens of a batch."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question. chain: the answer ends a chain of thought; otherwise the reply begins with it."""

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


@torch.inference_mode()
@without_plans()
def answers(model: Any, tokenizer: Any, items: list[Item], label: str) -> list[bool]:
    """Which items the model answers right, greedy, in left-padded batches of like length."""
    order = sorted(range(len(items)), key=lambda i: (items[i].length, items[i].new_tokens))
    right = [False] * len(items)
    batches: list[list[int]] = []
    for i in order:
        if not batches or (len(batches[-1]) + 1) * items[i].length > BATCH_TOKENS or len(batches[-1]) == 256:
            batches.append([])
        batches[-1].append(i)
    for batch in track(batches, description=label, console=Console(stderr=True)):
        inputs = tokenizer([items[i].prompt for i in batch], return_tensors="pt", padding=True).to(model.device)
        limit = max(items[i].new_tokens for i in batch)
        out = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
        replies = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        for i, reply in zip(batch, replies, strict=True):
            right[i] = items[i].right(reply)
    return right


def main(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id.")],
    data: Annotated[Path, typer.Argument(help="The folder of task sets.")],
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="As of turbo-hf eval: preset, preset/attention, preset@selector:choice=value. Default: "
            "the presets that need no calibration."
        ),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="A family; may be repeated. Default: all.")] = None,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt taken.")] = 16384,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt taken.")] = 0,
    calibration: Annotated[str, typer.Option(help="A folder or Hub id; auto: beside the checkpoint.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
) -> None:
    """Measure, print a table, write the counts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    loaded = loaded.to(device).eval()
    items = [item for item in load_items(data, tokenizer, longest, shortest) if not task or item.task in task]
    plain = [name for name, config in PRESETS.items() if config.sparse is None]
    configs = {name: _config(name) for name in method or plain}
    facts = {
        "model": Path(model).name,
        "device": _device_name(device),
        "torch": torch.__version__,
        "transformers": __version__,
        "longest": longest,
        "shortest": shortest,
    }
    runs: dict[str, list[bool]] = {}
    seconds: dict[str, float] = {}
    read: dict[str, list[dict[str, float]]] = {}
    table: dict[str, Any] = {}
    for name in ("baseline", "baseline again", *configs):
        start = time.perf_counter()
        with patch(loaded, configs[name], calibration=calibration) if name in configs else nullcontext() as handle:
            runs[name] = answers(loaded, tokenizer, items, name)
            if handle is not None:
                read[name] = _read(handle.report())
        seconds[name] = round(time.perf_counter() - start, 1)
        table = _table(items, runs)
        # written after each method: a run that is cut short keeps what it has
        out.write_text(json.dumps({**facts, "seconds": seconds, "keys_read": read, "families": table}, indent=1))
    _print(table)
    for name, layers in read.items():
        if layers:
            there, dense, keys = (sum(layer[part] for layer in layers) for part in ("there", "dense", "read"))
            beyond = (keys - dense) / max(1, there - dense)
            Console().print(f"{name}: {keys / there:.2%} of the keys read, {beyond:.2%} beyond the dense part")


def _config(method: str) -> TurboConfig:
    """What a method patches the model with; ValueError: it does not."""
    config = method_named(method).config
    if config is None:
        raise ValueError(f"{method} is the unpatched model, which runs anyway; name presets.")
    return config


def _read(report: Report) -> list[dict[str, float]]:
    """By sparse layer, the keys that were read and their shares."""
    return [{**asdict(layer), "share": layer.share, "share_beyond": layer.share_beyond} for layer in report.selectivity]


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def _table(items: list[Item], runs: dict[str, list[bool]]) -> dict[str, Any]:
    """Counts of each family and method, paired with the baseline."""
    places = defaultdict(list)
    for i, item in enumerate(items):
        places[item.task].append(i)
    places["all"] = list(range(len(items)))
    table: dict[str, Any] = {}
    for task, where in places.items():
        base = [runs["baseline"][i] for i in where]
        table[task] = {"items": len(where), "baseline": sum(base)}
        for name, run in runs.items():
            if name != "baseline":
                table[task][name] = asdict(paired(base, [run[i] for i in where]))
    return table


def _print(table: dict[str, Any]) -> None:
    methods = [name for name in table["all"] if name not in ("items", "baseline")]
    shown = Table(title="right answers; - lost, + gained against the baseline")
    for heading in ("family", "items", "baseline", *methods):
        shown.add_column(heading)
    for task, row in table.items():
        cells = [f"{row[m]['kept'] + row[m]['gained']} (-{row[m]['lost']} +{row[m]['gained']})" for m in methods]
        shown.add_row(task, str(row["items"]), str(row["baseline"]), *cells)
    Console(width=160).print(shown)


if __name__ == "__main__":
    typer.run(main)
