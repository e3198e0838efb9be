"""Random histories of a cache, judged by a plain oracle.

A history is a list of acts, each with a seed of its own: passes of all lengths over left-padded and ragged batches,
crops, reorders, selections, repeats, copies, resets, recording, and wrong calls.
What the cache must hold is kept beside it as lists of tokens. Every answer is compared with the unpatched model's to
the same tokens in one pass from nothing, and, where a cache loses something, with that of a row that lived alone.
"""

import traceback
from collections import Counter
from random import Random

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
