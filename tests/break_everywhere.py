"""Breaks off every operation on a cache at every line that it runs, by every route, and says what is left of the cache.

    python tests/break_everywhere.py [--step 1] [--routes compressed,unpatched]

Exits with 1 if any cache was read on and wrong.
"""

import argparse
import sys
from collections import Counter

from breaks_support import OPERATIONS, SOURCES, TORCH, Broken, BrokenError, every_line, routes


def main() -> int:
    """Print one line for each route, operation and kind of error, and the sum."""
    known = routes()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=1, help="break off at each so-manieth line")
    parser.add_argument("--routes", default=",".join(known))
    chosen = parser.parse_args()
    total: Counter[str] = Counter()
    for name in chosen.routes.split(","):
        route = known[name]()
        for operation in OPERATIONS:
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
