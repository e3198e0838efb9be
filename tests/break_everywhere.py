"""Breaks off every operation on a cache at every line that it runs, by every route, and says what is left of the cache.

    python tests/break_everywhere.py [--step 1] [--routes compressed,unpatched,replayed]

Exits with 1 if any cache was read on and wrong.
"""

import argparse
import sys
from collections import Counter
from typing import Any

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
    vars_of.appends_in_place = lambda layer: layer.seen > 0
    model = tiny_llama()
    return Route("replayed", model, turbo_hf.patch(model, TurboConfig(bits=8, block_size=32)).new_cache)


def main() -> int:
    """Print one line for each route, operation and kind of error, and the sum."""
    known = {**routes(), "replayed": _replayed}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=1, help="break off at each so-manieth line")
    parser.add_argument("--routes", default=",".join(known))
    chosen = parser.parse_args()
    total: Counter[str] = Counter()
    for name in chosen.routes.split(","):
        route = known[name]()
        for operation in STEPS if name == "replayed" else OPERATIONS:
            for kind in (Broken, BrokenError):
                try:
                    found = every_line(route, operation, kind, chosen.step, SOURCES + TORCH)
                except (ValueError, AttributeError) as refusal:
                    # a layer that cannot be cropped, or has no such method
                    sys.stdout.write(f"{name} {operation.name}: {refusal}\n")
                    break
                total += found
                sys.stdout.write(f"{name} {operation.name} {kind.__name__}: {dict(found)}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{sum(total.values())} places: {dict(total)}\n")
    return int(any(verdict.startswith("WRONG") for verdict in total))


if __name__ == "__main__":
    sys.exit(main())
