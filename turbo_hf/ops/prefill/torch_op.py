"""The prefill kernel as an operator of torch, so that `torch.compile` sees one node with known shapes."""

from collections.abc import Sequence

import torch

from turbo_hf.layout import AttentionOutput, KVStore, PagedHeads, Rounding, Scoring


def traced_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    rounding: Rounding,
    past: KVStore | None,
    starts: torch.Tensor | None,
    causal: bool,
    window: int | None,
    kept: torch.Tensor | None = None,
) -> AttentionOutput:
    """`launch_prefill` as the one node of a graph that `torch.compile` makes. Operators take no tuples, so these are
    unpacked here and packed again in `_prefill`."""
    tensors, numbers = past_as_lists(past)
    return AttentionOutput(*_prefill(q, k, v, *scoring, *rounding, tensors, numbers, starts, causal, window, kept))


def past_as_lists(past: KVStore | None) -> tuple[list[torch.Tensor], list[int]]:
    """A cache as an operator takes it: its tensors, and [block, bits of each group of heads]."""
    if past is None:
        return [], []
    tensors = [x for pages in past.paged for x in pages[1:]]
    return [*past[1:9], *tensors], [past.block, *(pages.bits for pages in past.paged)]


def past_of_lists(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> KVStore | None:
    """The inverse of `past_as_lists`."""
    if not tensors:
        return None
    paged = [PagedHeads(bits, *tensors[8 + 4 * i : 12 + 4 * i]) for i, bits in enumerate(numbers[1:])]
    order, table, sealed, k_open, v_open, k_scale, v_scale, open_len = tensors[:8]
    return KVStore(tuple(paged), order, table, sealed, k_open, v_open, k_scale, v_scale, open_len, numbers[0])


@torch.library.custom_op("turbo_hf::prefill", mutates_args=())
def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    sas_threshold: float | None,
    mode: str,
    block: int,
    v_scale: str,
    smooth_k: bool,
    hadamard: bool,
    past: Sequence[torch.Tensor],
    past_numbers: Sequence[int],
    starts: torch.Tensor | None,
    causal: bool,
    window: int | None,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """past, past_numbers: as `past_as_lists` gives them."""
    from turbo_hf.ops.prefill.launch import launch_prefill  # noqa: PLC0415 - needs Triton

    scoring = Scoring(scaling, softcap, sinks, sas_threshold)
    rounding = Rounding(mode, block, v_scale, smooth_k, hadamard)
    held = past_of_lists(past, past_numbers)
    out, lse = launch_prefill(q, k, v, scoring, rounding, held, starts, causal, window, kept)
    return out, lse


@_prefill.register_fake
def _(q: torch.Tensor, *args: object) -> AttentionOutput:
    batch, heads, tokens, dim = q.shape
    out = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return AttentionOutput(out, q.new_empty(batch, heads, tokens, dtype=torch.float32))
