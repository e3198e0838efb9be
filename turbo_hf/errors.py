"""What cannot be done, and how the user chose to hear of it."""

import logging
import warnings
from typing import Literal

import torch

Strict = Literal["raise", "warn", "fallback"]
logger = logging.getLogger(__name__)


class Unsupported(ValueError):
    """Something that compressed attention cannot do; the message says what to do instead."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU's memory is full: torch has a class for it, CUDA and cuBLAS have words."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )


def complain(strict: Strict, message: str) -> None:
    """Raise, warn, or (fallback) note in the log, as the user chose."""
    if strict == "raise":
        raise Unsupported(message)
    if strict == "warn":
        warnings.warn(message, stacklevel=3)
    else:
        logger.info(message)
