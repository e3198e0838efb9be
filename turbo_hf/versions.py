"""The versions of Transformers that the tests run with."""

import transformers
from packaging.version import Version

OLDEST, NEWEST = Version("5.17"), Version("5.23")


def check_version() -> str | None:
    """What is wrong with the installed Transformers version; None: it is in the tested range."""
    version = Version(transformers.__version__)
    if OLDEST <= Version(f"{version.major}.{version.minor}") <= NEWEST:
        return None
    return (
        f"transformers {version} is outside the tested range {OLDEST} to {NEWEST}. "
        'Install one of those, or pass strict="warn" to go on.'
    )
