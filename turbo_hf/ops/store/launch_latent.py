"""Launches of the kernels that store latents. Imported only where one runs, as it needs Triton."""

import torch

from turbo_hf.layout import KVStore
from turbo_hf.ops.store.kernel_latent import append_latent_kernel, latent_step_kernel, seal_latents_kernel


def launch_append_latents(
    latent: torch.Tensor,
    rotary: torch.Tensor,
    store: KVStore,
    starts: torch.Tensor | None,
    nonfinite: torch.Tensor,
) -> None:
    """`StoreOps.append_tokens` for latents. latent: [B, 1, M, rank]."""
    batch, _, tokens, rank = latent.shape
    with torch.cuda.device_of(latent):
        if tokens:
            append_latent_kernel[(tokens, batch)](
                latent.contiguous(), rotary.contiguous(),
                store.k_open, store.v_open, store.k_scale, store.v_scale,
                store.open_len, starts, nonfinite,
                tokens, store.k_open.shape[2],
                RANK=rank, ROTARY=rotary.shape[-1], QUANTIZED=store.k_open.dtype == torch.int8, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    store.open_len.add_(tokens if starts is None else tokens - starts)


def launch_seal_latents(store: KVStore, blocks: int, moves: bool = False) -> None:
    """`StoreOps.seal_open` for latents."""
    (pages,) = store.paged
    batch, _, cap, rank = store.k_open.shape
    with torch.cuda.device_of(store.k_open):
        seal_latents_kernel[(blocks, batch)](
            tuple(pages[1:]), (store.k_open, store.v_open, store.k_scale, store.v_scale),
            store.table, store.sealed, store.open_len,
            store.table.stride(0), cap,
            RANK=rank, ROTARY=store.v_open.shape[2], BITS=pages.bits, BLOCK=store.block, MOVES=moves, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip


def launch_latent_step(latent: torch.Tensor, rotary: torch.Tensor, store: KVStore, nonfinite: torch.Tensor) -> None:
    """`StoreOps.append_step` for latents. latent: [B, 1, 1, rank]."""
    (pages,) = store.paged
    with torch.cuda.device_of(latent):
        latent_step_kernel[(len(latent),)](
            latent.contiguous(), rotary.contiguous(), tuple(pages[1:]),
            (store.k_open, store.v_open, store.k_scale, store.v_scale),
            store.table, store.sealed, store.open_len, nonfinite,
            store.table.stride(0), store.k_open.shape[2],
            RANK=latent.shape[-1], ROTARY=rotary.shape[-1], BITS=pages.bits, BLOCK=store.block, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
