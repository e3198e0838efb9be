"""Versions of packages, and the versions of Transformers that the tests run with."""

from importlib.metadata import PackageNotFoundError, version

import transformers
from packaging.version import Version

OLDEST, NEWEST = Version("5.17"), Version("5.23")


def version_of(package: str) -> str | None:
    """The installed version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_problem() -> str | None:
    """What is wrong with the installed Transformers version; None: it is in the tested range."""
    here = Version(transformers.__version__)
    if OLDEST <= Version(f"{here.major}.{here.minor}") <= NEWEST:
        return None
    return f"transformers {here} is outside the tested range {OLDEST} to {NEWEST}. Install one of those."
