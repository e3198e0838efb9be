"""The prefill kernel as an operator of torch, so that `torch.compile` sees one node with known shapes."""

from collections.abc import Sequence

import torch

from turbo_hf.layout import AttentionOutput, KVStore, PagedHeads


def pack_past(past: KVStore | None) -> tuple[list[torch.Tensor], list[int]]:
    """A cache as an operator takes it: its tensors, and [block, bits of each group of heads]."""
    if past is None:
        return [], []
    tensors = [x for pages in past.paged for x in pages[1:]]
    return [*past[1:9], *tensors], [past.block, *(pages.bits for pages in past.paged)]


def unpack_past(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> KVStore | None:
    """The inverse of `pack_past`."""
    if not tensors:
        return None
    paged = [PagedHeads(bits, *tensors[8 + 4 * i : 12 + 4 * i]) for i, bits in enumerate(numbers[1:])]
    order, table, sealed, k_open, v_open, k_scale, v_scale, open_len = tensors[:8]
    return KVStore(tuple(paged), order, table, sealed, k_open, v_open, k_scale, v_scale, open_len, numbers[0])


@torch.library.custom_op("turbo_hf::prefill", mutates_args=())
def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: Sequence[torch.Tensor],
    past_numbers: Sequence[int],
    starts: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    mode: str,
    sas_threshold: float | None,
    block: int,
    v_scale: str,
    smooth_k: bool,
    hadamard: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`turbo_hf.ops.prefill.prefill` through its kernels, on checked arguments; `past` as `pack_past` gives it."""
    from turbo_hf.ops.prefill import launch  # noqa: PLC0415 - needs Triton

    out, lse = launch.prefill(
        q,
        k,
        v,
        scaling=scaling,
        past=unpack_past(past, past_numbers),
        starts=starts,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        mode=mode,
        sas_threshold=sas_threshold,
        block=block,
        v_scale=v_scale,
        smooth_k=smooth_k,
        hadamard=hadamard,
    )
    return out, lse


@prefill.register_fake
def _(q: torch.Tensor, *args: object) -> AttentionOutput:
    batch, heads, tokens, dim = q.shape
    out = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return AttentionOutput(out, q.new_empty(batch, heads, tokens, dtype=torch.float32))
