"""What torch.compile is told about this package."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """The same function; torch.compile calls it, and what it calls, as they are, and compiles what stands around it.

    A cache counts its tokens on the host: traced, each count would be compiled anew, and what cannot be traced fails.
    """
    plain: F = torch.compiler.disable(function)
    return plain
