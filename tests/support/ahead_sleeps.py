"""The process that compiles ahead, with a job that has no end."""

import time

from turbo_hf.graphs import compile_ahead


def _sleeps(job: object) -> None:
    time.sleep(3600)


def main() -> None:
    """As `compile_ahead.main`."""
    compile_ahead.compile_ahead = _sleeps
    compile_ahead.main()
