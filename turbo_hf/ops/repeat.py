"""Launches of a decode step that are made again at each step, with other addresses of new tokens and nothing else new.

Checks, the choice of a kernel, its plan and its workspace depend on what a `Repeat` is made for: the tensors of a cache
(whoever owns it takes a new one once these change) and its key.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from turbo_hf.layout import Scoring
from turbo_hf.ops import gpu


class Repeat:
    """What `append_tokens` and `decode` keep for the next step over the very same store. A copy of it is empty.

    append: of new keys, values and queries to be balanced; returns the balanced ones, in memory that it writes again.
    decode: of queries and a SAS threshold; returns (out, lse), the second in memory that it writes again.
    """

    __slots__ = ("append", "decode")

    def __init__(self) -> None:
        self.append: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None] | None = None
        self.decode: Callable[[torch.Tensor, float | None], tuple[torch.Tensor, torch.Tensor]] | None = None

    def __reduce__(self) -> Any:
        # addresses are those of the original
        return Repeat, ()


def repeat_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, scoring: Scoring
) -> tuple[Any, ...]:
    """All that a launch for q, k and v depends on, but for addresses, the cache and a threshold."""
    device = q.get_device()
    if scoring.sas_threshold is not None:
        # a context's own falls with each token
        scoring = scoring._replace(sas_threshold=0.0)
    return (
        (q.dtype, q.shape, q.stride(), q.data_ptr() % 16),
        (k.dtype, k.shape, k.stride(), k.data_ptr() % 16, k.get_device() == device),
        (v.dtype, v.shape, v.stride(), v.data_ptr() % 16, v.get_device() == device),
        starts,
        scoring,
        # a workspace is of one thread and stream
        get_ident(),
        gpu.raw_stream(device),
    )
