"""Launch of the decode kernel: its tile sizes, its plan and its workspace."""

from functools import lru_cache
from typing import NamedTuple

import torch

from turbo_hf.layout import AttentionOutput, KVStore
from turbo_hf.ops.schedule import Plan, stream_k, tiles_of

BLOCKS = 4
"""Blocks in a tile: one a warp."""


SETUP = 10.0
"""Cost of beginning an output, where a tile of `bits` bit costs bits + 1."""


class Tuning(NamedTuple):
    """occupancy: CTAs of an SM. stages: tiles on their way in each, the one at work included."""

    occupancy: int
    stages: int
    registers: int | None = None


def tuning(dim: int, bits: int, block: int) -> Tuning:
    """Launch configuration for heads of `dim` channels, the widest at `bits` bit."""
    return Tuning(2, 3)


@lru_cache(maxsize=8)
def _sms(device: torch.device) -> int:
    """Streaming multiprocessors; without a GPU the number by which tests cut their small cases."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=64)
def _plan(
    sealed: tuple[int, ...], groups: tuple[tuple[int, int], ...], chunks: int, ctas: int, device: torch.device
) -> tuple[Plan, torch.Tensor]:
    """The plan of a cache with these lengths, and its words on the device."""
    cost = torch.tensor([bits + 1.0 for bits, slots in groups for _ in range(slots * chunks)], dtype=torch.float64)
    tiles = torch.tensor(tiles_of(sealed, BLOCKS)).repeat_interleave(len(cost))
    plan = stream_k(tiles, cost.repeat(len(sealed)), ctas, SETUP)
    return plan, plan.words.to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _workspace(
    device: torch.device, stream: int, ctas: int, outputs: int, floats: int, scratch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial results, arrival counters (zeros, as each launch leaves them) and the quantized queries of each CTA."""
    return (
        torch.empty(2 * ctas * floats, dtype=torch.float32, device=device),
        torch.zeros(outputs, dtype=torch.int32, device=device),
        torch.empty(ctas * scratch, dtype=torch.int8, device=device),
    )


def launch_decode(
    q: torch.Tensor,
    store: KVStore,
    *,
    scaling: float,
    starts: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mode: str,
    sas_threshold: float | None,
) -> AttentionOutput:
    """`ops.decode` by the Triton kernel; arguments as there, checked."""
    # deferred: the package imports without Triton
    from turbo_hf.kernels.decode import decode_kernel

    batch, heads, tokens, dim = q.shape
    kv_heads, cap = store.k_open.shape[1:3]
    group = heads // kv_heads
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)
    rows, spread = 8, group * tokens <= 4
    per_output = rows // 2 if spread else rows
    chunks = -(-group * tokens // per_output)
    padded = max(32, 1 << (dim - 1).bit_length())
    groups = tuple((pages.bits, pages.k.shape[1]) for pages in store.heads)
    tune = tuning(dim, max(bits for bits, _ in groups), store.block)
    sealed = store.sealed_host
    if sealed is None:
        sealed = tuple(store.sealed.tolist())
    plan, words = _plan(sealed, groups, chunks, _sms(q.device) * tune.occupancy, q.device)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    turbo = mode == "turbo"
    parts, arrived, scratch = _workspace(
        q.device, stream, _sms(q.device) * tune.occupancy, plan.outputs, per_output * (padded + 2),
        rows * dim * (1 if turbo else q.element_size()),
    )  # fmt: skip
    decode_kernel[(plan.ctas,)](
        q,
        out,
        lse,
        store.open_len if starts is None else starts,
        lse if sinks is None else sinks,
        tuple((pages.k, pages.v, pages.meta, pages.scale) for pages in store.heads),
        (store.k_open, store.v_open, store.k_scale, store.v_scale),
        store.order.contiguous(),
        store.table,
        store.sealed,
        store.open_len,
        words,
        parts,
        arrived,
        scratch if turbo else scratch.view(q.dtype),
        q.stride(),
        store.table.stride(0),
        cap,
        tokens,
        window or 0,
        scaling,
        softcap or 0.0,
        sas_threshold or 0.0,
        SLOTS=tuple(slots for _, slots in groups),
        BITS=tuple(bits for bits, _ in groups),
        GROUP=group,
        D=dim,
        DP=padded,
        BLOCK=store.block,
        NB=BLOCKS,
        R=rows,
        SPREAD=spread,
        TURBO=turbo,
        WINDOW=window is not None,
        CAPPED=softcap is not None,
        SAS=sas_threshold is not None,
        STARTS=starts is not None,
        SINKS=sinks is not None,
        STAGES=tune.stages,
        PARTS=16,
        ASM=q.is_cuda,
        num_warps=BLOCKS,
        maxnreg=tune.registers,
    )
    return AttentionOutput(out, lse)
