"""Random histories of a cache, judged by a plain oracle: `python tests/support/histories.py --count 20000 --seed 1`.

A history is a list of acts, each with a seed of its own: passes of all lengths over left-padded and ragged batches,
crops, reorders, selections, repeats, copies, resets, recording, and wrong calls.
What the cache must hold is kept beside it as lists of tokens. Every answer is compared with the unpatched model's to
the same tokens in one pass from nothing, and, where a cache loses something, with that of a row that lived alone.
"""

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from random import Random

import torch
from histories_acts import Fault, History
from histories_player import Player
from histories_support import CONFIGS, FAMILIES, subject

ACTS = {
    "advance": 10,
    "crop": 4,
    "choose": 3,
    "fork": 2,
    "record": 2,
    "look": 1,
    "reset": 1,
    "wrong": 1,
}
"""Acts, and how often they are drawn."""


def draw(seed: int) -> History:
    """The history of a seed."""
    r = Random(seed)
    family, config = r.choice(list(FAMILIES)), r.choice(list(CONFIGS))
    names = ["advance", *r.choices(list(ACTS), list(ACTS.values()), k=r.randint(2, 9))]
    return History(family, config, tuple((name, r.getrandbits(32)) for name in names))


def fault_of(history: History, counts: Counter[str] | None = None) -> str | None:
    """What is wrong with a cache of this history; None: nothing."""
    player = Player(history, subject(history.family, history.config), counts=Counter() if counts is None else counts)
    try:
        player.play()
    except Fault as fault:
        return f"act {player.number}: {fault}"
    except Exception as error:
        where = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:]))
        return f"act {player.number}: {type(error).__name__}: {error}\n{where}"
    return None


def shrunk(history: History) -> History:
    """As few acts of a faulty history as still show a fault."""
    at = 1
    while at < len(history.acts):
        shorter = history._replace(acts=history.acts[:at] + history.acts[at + 1 :])
        if fault_of(shorter) is not None:
            history = shorter
        else:
            at += 1
    return history


def described(seed: int) -> str | None:
    """The fault of a seed's history, and what is left of it when it is shrunk."""
    history = draw(seed)
    fault = fault_of(history)
    if fault is None:
        return None
    small = shrunk(history)
    return f"seed {seed}: {fault}\nshrunk: {small}\n{fault_of(small)}"


def _some(seeds: range) -> tuple[Counter[str], list[str]]:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    faulty = [seed for seed in seeds if fault_of(draw(seed), counts) is not None]
    return counts, [described(seed) or "" for seed in faulty]


def main() -> int:
    """Whether a history is faulty."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history; each has the next one")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    begin, counts, wrong, done = time.monotonic(), Counter[str](), 0, 0
    end = given.seed + given.count
    parts = [range(first, min(first + 50, end)) for first in range(given.seed, end, 50)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(given.processes) if given.processes > 1 else nullcontext() as pool:
        for part, (more, found) in zip(parts, (pool.imap if pool else map)(_some, parts), strict=True):
            counts += more
            wrong += len(found)
            done += len(part)
            for fault in found:
                _say(fault)
            if done % 1000 == 0:
                _say(f"{done} histories, {wrong} wrong, {time.monotonic() - begin:.0f} s")
    _say(f"{done} histories from seed {given.seed}: {wrong} wrong. {dict(counts)}")
    return int(wrong > 0)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
