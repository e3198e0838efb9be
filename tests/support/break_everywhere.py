"""Breaks off every operation on a cache at every line that it runs, by every route, and says what is left of the cache.

    python tests/support/break_everywhere.py [--step 1] [--routes compressed,unpatched,replayed] [--processes 2]

Exits with 1 if any cache was read on and wrong.
"""

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from breaks_support import (
    HELD,
    OPERATIONS,
    SOURCES,
    TORCH,
    Broken,
    BrokenError,
    Operation,
    Route,
    every_line,
    routes,
)
from graphs_support import Again, replayed
from models import tiny_llama

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cache.layer import TurboLayer

STEPS = [
    Operation(f"steps behind {held}", held, 4, replayed(Again, 4), one_by_one=True) for held in (HELD - 20, HELD - 1)
]


def _replayed() -> Route:
    """Steps over a stand-in for CUDA graphs."""
    vars_of: Any = TurboLayer
    vars_of.appends_in_place = lambda layer: True
    model = tiny_llama()
    return Route("replayed", model, turbo_hf.patch(model, TurboConfig(bits=8, block_size=32)).new_cache)


ROUTES = {**routes(), "replayed": _replayed}


def _share(name: str, step: int, first: int) -> Counter[tuple[str, str]]:
    """Verdicts by operation and kind of error, over each `step`-th line from `first` on."""
    torch.set_num_threads(1)
    route, found = ROUTES[name](), Counter[tuple[str, str]]()
    for operation in STEPS if name == "replayed" else OPERATIONS:
        for kind in (Broken, BrokenError):
            try:
                verdicts = every_line(route, operation, kind, step, SOURCES + TORCH, first)
            except (ValueError, AttributeError) as refusal:
                # a layer that cannot be cropped, or has no such method
                found[operation.name, f"cannot: {refusal}"] += 1
                break
            found.update({(f"{operation.name} {kind.__name__}", verdict): n for verdict, n in verdicts.items()})
    return found


def main() -> int:
    """Print the verdicts of each route by operation and kind of error, and their sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=1, help="break off at each so-manieth line")
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    total, n = Counter[str](), chosen.processes
    # a process of its own each: one route replaces a method
    with ProcessPoolExecutor(n, max_tasks_per_child=1) as pool:
        of = {
            name: [pool.submit(_share, name, chosen.step * n, 1 + chosen.step * at) for at in range(n)]
            for name in chosen.routes.split(",")
        }
        for name, shares in of.items():
            found = sum((share.result() for share in shares), Counter[tuple[str, str]]())
            for (what, verdict), count in sorted(found.items()):
                sys.stdout.write(f"{name} {what}: {count} {verdict}\n")
                total[verdict] += count * (not verdict.startswith("cannot"))
            sys.stdout.flush()
    sys.stdout.write(f"{sum(total.values())} places: {dict(+total)}\n")
    return int(any(verdict.startswith("WRONG") for verdict in total))


if __name__ == "__main__":
    sys.exit(main())
