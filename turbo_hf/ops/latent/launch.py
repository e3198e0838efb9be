"""Launches of the kernels of latent attention. Imported only where one runs, as it needs Triton."""

import math

import torch
import triton
import triton.language as tl

from turbo_hf.layout import UNQUANTIZED, AttentionOutput, KVStore
from turbo_hf.ops import gpu
from turbo_hf.ops.latent.kernel import latent_kernel, merge_kernel

ROWS = 16
"""Queries per program at least: the M of a 16-bit tensor-core product."""

MOST_ROWS = 64
"""Queries per program at most: their sums fill the registers of eight warps."""

MERGED = 32
"""Shares that a program of the merge loads at once."""

MERGED_CHANNELS = 64
"""Channels of a program of the merge: with 16 queries of rank 512, as many programs as a GPU has SMs."""

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


MOST_SHARES = 256
"""Parts that one query's output is merged from at most."""


def schedule(rows: int, bits: int) -> tuple[int, int]:
    """Warps and pipeline stages of a program for so many queries (H100: `eval/results/decode-log.md`)."""
    if rows > ROWS:
        return 8, 2
    return 4, 3 if bits == UNQUANTIZED else 2


def shares_of(programs: int, blocks: int, sms: int) -> int:
    """Into how many shares the blocks of a row are cut, so that all SMs have work."""
    return max(1, min(sms // max(1, programs), blocks // 2, MOST_SHARES))


def launch_latent_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    store: KVStore,
    scaling: float,
    starts: torch.Tensor | None,
    interpreted: bool,
) -> AttentionOutput:
    """`ops.latent.contract.latent_decode`, but for the output of padding, which is arbitrary."""
    (batch, heads, tokens, rank), device = q_latent.shape, q_latent.device
    (pages,), count = store.paged, heads * tokens
    rows = min(MOST_ROWS, max(ROWS, triton.next_power_of_2(count)))
    groups = triton.cdiv(count, rows)
    blocks = max(store.sealed_host) if store.sealed_host is not None else store.table.shape[1]
    warps, stages = schedule(rows, pages.bits)
    shares = shares_of(batch * groups, blocks, gpu.sms(device))
    parts = torch.empty(batch, shares, count, rank, dtype=torch.float32, device=device)
    part_lse = torch.empty(batch, shares, count, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, tokens, rank, dtype=q_latent.dtype, device=device)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=device)
    kind = tl.float32 if interpreted else TYPES[q_latent.dtype]
    channels = min(MERGED_CHANNELS, rank)
    with torch.cuda.device_of(q_latent):
        latent_kernel[(shares, groups, batch)](
            q_latent.contiguous(), q_rotary.contiguous(),
            pages.k, pages.v, pages.meta, pages.scale,
            store.k_open, store.v_open, store.k_scale, store.v_scale,
            store.table, store.sealed, store.open_len, starts,
            parts, part_lse,
            store.table.stride(0), store.k_open.shape[2], scaling * math.log2(math.e), count,
            RANK=rank, ROTARY=q_rotary.shape[-1], BITS=pages.bits, BLOCK=store.block, ROWS=rows, TOKENS=tokens,
            SHARES=shares, TYPE=kind, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        merge_kernel[(count, rank // channels, batch)](
            parts, part_lse, out, lse, count, shares,
            RANK=rank, MOST=triton.next_power_of_2(shares), CHANNELS=channels, AT_ONCE=MERGED, num_warps=4,
        )  # fmt: skip
    return AttentionOutput(out, lse)
