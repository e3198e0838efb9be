"""Attention of a decode step as one operator of torch, so that a whole step can be compiled as one graph.

The compiled step gets a `StepView` instead of the cache. A view never changes, so that compiled code does not depend on
lengths, pages or tables. When the operator runs, it takes the cache from a variable of its thread (`attending`).
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from turbo_hf.cache.guards import untraced
from turbo_hf.layout import Rotary, Scoring
from turbo_hf.models.model_layers import CACHE_KEYWORDS

Kind = tuple[int | None, bool]
"""A layer's window, and whether its steps are sparse."""

StepCall = tuple[torch.Tensor, int, Rotary | None]
"""What the hook adds to a call of an attention module under a `StepView`, as the keyword `turbo`: mark, layer, rotary.

A plain tuple, for torch 2.11 loses the fields of a NamedTuple that is made while it traces.
"""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Rotary | None, Scoring], torch.Tensor]
"""(layer, query, key, value, rotary, scoring) -> [B, Hq, 1, D]; tensors as in `turbo_attention`."""

_now = threading.local()


class _ViewLayer(CacheLayerMixin):
    """A cache layer that passes new tokens on, as if it were empty: mask and positions are arguments of the step."""

    is_compileable = True

    def __init__(self, window: int | None):
        super().__init__()
        self.is_sliding, self.is_initialized = window is not None, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to initialize."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens, which the operator stores."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if the cache were empty."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """As if the cache were empty."""
        return 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class StepView(Cache):
    """The cache that a step sees while it is compiled, and whenever the compiled code runs.

    Args:
        kinds: the kind of each layer.
        device: device of the cache.
    """

    def __init__(self, kinds: Sequence[Kind], device: torch.device):
        super().__init__(layers=[_ViewLayer(window) for window, _ in kinds])
        self._sparse = tuple(sparse for _, sparse in kinds)
        # the operator is declared to change this, so that its calls are neither merged, reordered nor removed
        with torch.inference_mode(False):
            self._mark = torch.zeros(1, dtype=torch.int32, device=device)

    def call_of(self, layer: int, rotary: Rotary | None) -> StepCall:
        """The keyword `turbo` of a layer's attention. rotary: this call's (cos, sin)."""
        return self._mark, layer, rotary if self._sparse[layer] else None


def step_view(kwargs: Mapping[str, Any]) -> StepView | None:
    """The `StepView` that a call of a module brings as its cache; None without one."""
    for name in CACHE_KEYWORDS:
        given = kwargs.get(name)
        if isinstance(given, StepView):
            return given
    return None


def outside_of_steps(at: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for hooks: `untraced`, and not called in a step that is compiled, which brings no cache.

    at: which of its arguments are the keywords of the module's call.
    """

    def of(hook: Callable[..., Any]) -> Callable[..., Any]:
        called = untraced(hook)

        @functools.wraps(hook)
        def thin(*given: Any) -> Any:
            return called(*given) if step_view(given[at]) is None else None

        # torch counts by code how often it compiles anew, and gives up after 8 times
        own: Any = thin
        own.__code__ = own.__code__.replace()
        return thin

    return of


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Inside, the operator calls `attend` in this thread."""
    _now.attend = attend
    try:
        yield
    finally:
        _now.attend = None


def nothing(layer: int, query: torch.Tensor, *args: Any) -> torch.Tensor:
    """An `Attend` that touches no cache, for a first run that only compiles."""
    return torch.zeros_like(query)


@torch.library.custom_op("turbo_hf::step_attention", mutates_args=("mark",))
def step_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mark: torch.Tensor,
    layer: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one new token per row, which joins the cache; returns [B, M, Hq, D]."""
    attend: Attend | None = getattr(_now, "attend", None)
    if attend is None:
        raise RuntimeError("turbo_hf::step_attention was called outside of a compiled step.")
    rotary = None if cos is None or sin is None else (cos, sin)
    out = attend(layer, query, key, value, rotary, Scoring(scaling, softcap, sinks))
    batch, heads, tokens, dim = query.shape
    return out.transpose(1, 2).reshape(batch, tokens, heads * dim).view(batch, tokens, heads, dim)


@step_attention.register_fake
def _(query: torch.Tensor, *args: object) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim)
