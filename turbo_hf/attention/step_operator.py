"""Attention of a decode step as one operator of torch, so that all of a layer can be compiled as one graph.

A compiled layer gets a `StepView` instead of the cache, so that its code depends on no length, page or table. When the
operator runs, it asks its thread (`attending`) for the attention of the layer that is called.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache

from turbo_hf.attention.turbo_attention import HARMLESS, NAME
from turbo_hf.errors import Unsupported
from turbo_hf.layout import Scoring

IN_LAYER = f"{NAME}_in_layer"
"""The value of `config._attn_implementation` in a layer that is compiled."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scoring], torch.Tensor]
"""(query, key, value, scoring) -> [B, Hq, 1, D]; tensors as in `turbo_attention`."""

_now = threading.local()


class StepView(Cache):
    """The cache that a compiled layer sees: it passes new tokens on, and the operator stores them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens. It reads no layer number, on which compiled code would then depend."""
        return key_states, value_states


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Inside, the operator calls `attend` in this thread."""
    _now.attend = attend
    try:
        yield
    finally:
        _now.attend = None


@torch.library.custom_op("turbo_hf::step_attention", mutates_args=())
def step_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one new token per row, which joins the cache; returns [B, M, Hq, D].

    It stores, and is called once in each compiled graph: its output is used, so that torch cannot leave it out.
    """
    attend: Attend | None = getattr(_now, "attend", None)
    if attend is None:
        raise RuntimeError("turbo_hf::step_attention was called outside of a compiled layer.")
    out = attend(query, key, value, Scoring(scaling, softcap, sinks))
    batch, heads, tokens, dim = query.shape
    return out.transpose(1, 2).reshape(batch, tokens, heads * dim).view(batch, tokens, heads, dim)


@step_attention.register_fake
def _(query: torch.Tensor, *args: object) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim)


def compiled_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `turbo_attention`, in a compiled layer: the operator.

    Raises:
        Unsupported: the call has an argument that the operator does not know.
    """
    known = attention_mask is None and is_causal in (None, True)
    for name, given in kwargs.items():
        known = known and (given is None or name in HARMLESS)
    if not known:
        raise Unsupported("its steps pass a mask or a keyword to their attention that is not known here")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: torch.Tensor = step_attention(query, key, value, scale, softcap, s_aux)
    return out, None
