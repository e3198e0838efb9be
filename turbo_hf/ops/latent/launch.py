"""Launches of the kernels of latent attention. Imported only where one runs, as it needs Triton."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from turbo_hf.layout import UNQUANTIZED, AttentionOutput, KVStore, Scoring, power_of_two
from turbo_hf.ops import gpu
from turbo_hf.ops.latent.kernel import latent_kernel, merge_kernel
from turbo_hf.ops.latent.kernel_named import named_kernel

ROWS = 16
"""Queries per program at least: the M of a 16-bit tensor-core product."""

MOST_ROWS = 64
"""Queries per program at most: their sums fill the registers of eight warps."""

KIB = {True: {MOST_ROWS: 168, 32: 132}, False: {MOST_ROWS: 105, 32: 69}}
"""KiB of shared memory that so many queries of 512 channels and a rotary part of 64 take, as compiled: over latents in
16 bit, and in fewer."""

MERGED_CHANNELS = 32
"""Channels of a program of the merge: with 16 queries of rank 512, two programs per SM."""

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


MOST_SHARES = 512
"""Parts that one query's output is merged from at most."""


def launch_latent_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    store: KVStore,
    scaling: float,
    starts: torch.Tensor | None,
    interpreted: bool,
) -> AttentionOutput:
    """`LatentOps.latent_decode`, but for the output of padding, which is arbitrary."""
    asked = q_latent.shape[2]
    more = power_of_two(asked) - asked
    if more:
        # kernels are compiled for each number of tokens: padding before a row's newest tokens, which is dropped
        q_latent, q_rotary = (torch.nn.functional.pad(q, (0, 0, more, 0)) for q in (q_latent, q_rotary))
        starts = None if starts is None else starts + more
    (batch, heads, tokens, rank), device = q_latent.shape, q_latent.device
    (pages,), count, rotary = store.paged, heads * tokens, q_rotary.shape[-1]
    unquantized, shared = pages.bits == UNQUANTIZED, gpu.shared_memory(device)
    taken = KIB[unquantized].items()
    most_rows = next((n for n, kib in taken if (kib << 10) * (rank + rotary) <= shared * 576), ROWS)
    rows = min(most_rows, max(ROWS, triton.next_power_of_2(count)))
    groups = triton.cdiv(count, rows)
    blocks = max(store.sealed_host) if store.sealed_host is not None else store.table.shape[1]
    hopper = _hopper_serves(store, rank, rotary, interpreted)
    # H100: `eval/results/decode-log.md`
    few = rows == ROWS
    warps, resident = 4 if few else 8, 2 if hopper and few else 1
    # as many programs run as the GPU holds at once
    shares = max(1, min(gpu.sms(device) * resident // max(1, batch * groups), blocks // 2, MOST_SHARES))
    parts = torch.empty(batch, shares, count, rank, dtype=torch.float32, device=device)
    part_lse = torch.empty(batch, shares, count, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, tokens, rank, dtype=q_latent.dtype, device=device)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=device)
    queries = q_latent.contiguous(), q_rotary.contiguous()
    held = *pages[1:], store.k_open, store.v_open, store.k_scale, store.v_scale
    places = store.table, store.sealed, store.open_len
    numbers = store.table.stride(0), store.k_open.shape[2], scaling * math.log2(math.e), count
    shape = {"RANK": rank, "ROTARY": rotary, "BITS": pages.bits, "ROWS": rows, "TOKENS": tokens}
    with torch.cuda.device_of(q_latent):
        if hopper:
            from turbo_hf.ops.latent.kernel_hopper import hopper_latent_kernel  # noqa: PLC0415 - needs Gluon

            hopper_latent_kernel[(shares, groups, batch)](
                *queries,
                *held,
                *places,
                parts,
                part_lse,
                *numbers,
                **shape,
                WARPS=warps,
                OVERLAP=not few,
                num_warps=warps,
            )
        else:
            latent_kernel[(shares, groups, batch)](
                *queries, *held, *places, starts, parts, part_lse, *numbers,
                **shape, BLOCK=store.block, SHARES=shares, TYPE=tl.float32 if interpreted else TYPES[q_latent.dtype],
                STAGES=3 if few and unquantized and shared >= gpu.H200_SHARED else 2, num_warps=warps,
            )  # fmt: skip
        _merge(parts, part_lse, out, lse)
    return AttentionOutput(out[:, :, more:], lse[:, :, more:])


def _hopper_serves(store: KVStore, rank: int, rotary: int, interpreted: bool) -> bool:
    """Whether the kernel for Hopper takes these latents."""
    (pages,), device = store.paged, store.k_open.device
    sizes = rank >= 256 and 32 <= rotary <= 64 and store.block == 64 and store.k_open.shape[2] % 4 == 0
    return sizes and pages.bits != UNQUANTIZED and not interpreted and gpu.hopper(device)


def _merge(parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    batch, shares, count, rank = parts.shape
    channels, most = min(MERGED_CHANNELS, rank), triton.next_power_of_2(shares)
    merge_kernel[(count, rank // channels, batch)](
        parts, part_lse, out, lse, count, shares,
        RANK=rank, MOST=most, CHANNELS=channels, num_warps=8,
        **gpu.pdl(out.device),
    )  # fmt: skip


class NamedTiles(NamedTuple):
    """How attention over named latents is split among programs.

    heads, tokens: of a tile. shares: parts of a query's tokens. warps: of a program.
    """

    heads: int
    tokens: int
    shares: int
    warps: int


def named_tiles(queries: int, heads: int, named: int, channels: int, device: torch.device) -> NamedTiles:
    """The split of `queries` query tokens, each of which names so many. channels: of a latent and its rotary part.

    On an H200 64 heads and 64 tokens were the fastest at 1, 8 and 32 rows: what is gathered serves most heads.
    """
    sms = gpu.sms(device)
    wide = gpu.shared_memory(device) >= gpu.H200_SHARED and channels <= 576
    of_tile = min(64 if wide else ROWS, max(ROWS, power_of_two(heads)))
    tokens = 64 if of_tile == 64 else 32 if wide else 16
    programs = queries * triton.cdiv(heads, of_tile)
    # as many programs run as the GPU has multiprocessors
    shares = max(1, min(sms // programs, triton.cdiv(named, tokens), MOST_SHARES))
    return NamedTiles(of_tile, tokens, shares, 4 if of_tile == ROWS else 8)


def launch_named_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    store: KVStore,
    places: torch.Tensor,
    seen: torch.Tensor,
    scoring: Scoring,
    interpreted: bool,
    tiles: NamedTiles | None = None,
) -> torch.Tensor:
    """`LatentOps.named_decode`. tiles: in place of `named_tiles`, to measure."""
    (batch, heads, tokens, rank), device = q_latent.shape, q_latent.device
    (pages,), rotary, named = store.paged, q_rotary.shape[-1], places.shape[2]
    at = tiles or named_tiles(batch * tokens, heads, named, rank + rotary, device)
    each = triton.cdiv(triton.cdiv(named, at.shares), at.tokens) * at.tokens
    shares = max(1, triton.cdiv(named, each))
    parts = torch.empty(batch, shares, heads * tokens, rank, dtype=torch.float32, device=device)
    part_lse = torch.empty(batch, shares, heads * tokens, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, tokens, rank, dtype=q_latent.dtype, device=device)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=device)
    with torch.cuda.device_of(q_latent):
        named_kernel[(triton.cdiv(heads, at.heads), shares, batch * tokens)](
            q_latent.contiguous(), q_rotary.contiguous(), pages.k.view(store.k_open.dtype), *pages[2:],
            store.k_open, store.v_open, store.k_scale, store.v_scale, store.table, store.sealed,
            places.contiguous(), seen.contiguous().view(torch.uint8), scoring.sinks, parts, part_lse,
            store.table.stride(0), store.k_open.shape[2], scoring.scaling * math.log2(math.e),
            heads, tokens, named, each,
            RANK=rank, ROTARY=rotary, BITS=pages.bits, BLOCK=store.block, HEADS=at.heads, TOKENS=at.tokens,
            TYPE=tl.float32 if interpreted else TYPES[q_latent.dtype], num_warps=at.warps,
        )  # fmt: skip
        _merge(parts, part_lse, out, lse)
    return out
