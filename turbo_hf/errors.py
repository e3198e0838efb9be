"""Errors and warnings about what cannot be done, as the user chose to be informed."""

import logging
import sys
import textwrap
import warnings
from typing import Literal

import torch

Strict = Literal["raise", "warn", "fallback"]
logger = logging.getLogger(__name__)

ERROR_LENGTH = 400
"""Characters of another library's error: some list every class there is."""


class Unsupported(ValueError):
    """Something that compressed attention cannot do; the message says what to do instead."""


def shortened(error: BaseException) -> str:
    """An error of another library as one short line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", ERROR_LENGTH, placeholder=" [...]")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU's memory is full: torch has a class for it, CUDA and cuBLAS only messages."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )


def complain(strict: Strict, message: str) -> None:
    """Raise, warn, or (fallback) write to the log, as the user chose."""
    if strict == "raise":
        raise Unsupported(message)
    if strict == "warn":
        warn(message)
    else:
        logger.info(message)


CALLERS = ("turbo_hf.", "torch.", "transformers.", "accelerate.")
"""Packages between a user's line and what is wrong with it."""


def warn(message: str) -> None:
    """Issue a warning at the user's line: the one that called this package, or a package of `CALLERS` that then did."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(CALLERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class Notices:
    """The messages of one patch: issued as the user chose, and kept in `messages` for the report.

    speaks: whether this process issues warnings; of several that patch one model, the first does.
    """

    def __init__(self, strict: Strict, speaks: bool = True):
        self.strict, self.speaks = strict, speaks
        self.messages: list[str] = []

    def note(self, message: str | None) -> None:
        """Something that the user should know: a warning; with "fallback", or where others speak, a log message. None:
        there is nothing."""
        if message is None:
            return
        complain("fallback" if self.strict == "fallback" or not self.speaks else "warn", message)
        self.messages.append(message)

    def refuse(self, message: str, remedy: str = "") -> None:
        """Something that cannot be done: with "raise" an error that names the remedy; otherwise as `note`."""
        if self.strict == "raise":
            raise Unsupported(f"{message} {remedy}".rstrip())
        self.note(message)
