"""Launches of the kernels that store tokens. Imported only where one runs, as it needs Triton."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from turbo_hf.layout import KVStore, power_of_two
from turbo_hf.ops.host_device import shared
from turbo_hf.ops.kernel_launch import Rows, cache_of, launch
from turbo_hf.ops.maths import balanced_queries
from turbo_hf.ops.store.kernel_append import QUERIES, append_kernel, append_step_kernel, seal_open_kernel
from turbo_hf.ops.store.kernel_latent import append_latent_kernel, latent_step_kernel, seal_latents_kernel
from turbo_hf.ops.store.kernel_moves import exchange_open_kernel, select_rows_kernel

APPENDED = 32
"""Maximum number of new tokens that a program appends: keys and values fit in registers."""

EXCHANGED = 128
"""Channels of open tokens that a program moves between slots and blocks."""

MOVED = 4096
"""32-bit words that a program moves when rows are permuted: they fit in registers."""

MOST_PAIRS = (1 << 16) - 1
"""CUDA's limit of gridDim.y, the dimension of rows times heads."""


class NewTokens(NamedTuple):
    """Keys and values [B, Hkv, M, D] with their strides."""

    k: Any
    v: Any
    k_strides: Any
    v_strides: Any


class NewQueries(NamedTuple):
    """Queries that are balanced on the way.

    data: [B, Hq, M, D]. strides: its strides. out: where they go, contiguous.
    heads, tokens, rows: Hq, M, and B Hq M.
    """

    data: Any
    strides: Any
    out: Any
    heads: Any
    tokens: Any
    rows: Any


class StoreForm(NamedTuple):
    """What kernels that seal are compiled for.

    slots, bits, value_bits: for each width, its KV heads, and the bits of their keys and values.
    heads: KV heads.
    dim, padded_dim: channels per head, and per tile.
    block: tokens per block.
    first, recent: open tokens before and behind those that are sealed (`KVStore`).
    """

    slots: tuple[int, ...]
    bits: tuple[int, ...]
    value_bits: tuple[int, ...]
    heads: int
    dim: int
    padded_dim: int
    block: int
    first: int
    recent: int


def pairs_of(batch: int, heads: int) -> int:
    """Rows times KV heads, each of which has programs of its own. ValueError: more than a launch takes."""
    if batch * heads > MOST_PAIRS:
        raise ValueError(
            f"{batch} rows of {heads} KV heads are more than the {MOST_PAIRS} pairs that a launch takes. Use a smaller "
            "batch."
        )
    return batch * heads


def _form_of(store: KVStore) -> StoreForm:
    """What a kernel that seals is compiled for."""
    slots, bits, value_bits = zip(
        *((pages.k.shape[1], pages.bits, pages.value_bits) for pages in store.paged), strict=True
    )
    heads, dim = store.k_open.shape[1::2]
    return StoreForm(slots, bits, value_bits, heads, dim, power_of_two(dim), store.block, store.first, store.recent)


def _warps(dim: int) -> int:
    """Of a program that holds a block of one head, 64 numbers a thread: more are spilled, and take long to compile."""
    return max(4, power_of_two(dim) // 32)


def _to_balance(queries: torch.Tensor | None) -> tuple[NewQueries | None, int]:
    """What a kernel that stores takes of these queries [B, Hq, M, D], and how many of its programs balance them."""
    if queries is None:
        return None, 0
    _, heads, tokens, dim = queries.shape
    rows = queries.numel() // dim
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    return NewQueries(queries, queries.stride(), out, heads, tokens, rows), -(-rows // QUERIES.value)


def launch_append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    store: KVStore,
    starts: torch.Tensor | None,
    nonfinite: torch.Tensor,
    counters: torch.Tensor,
    balance: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`StoreOps.append_tokens`; counters: int32 [B], zeros. Programs before the others balance the queries."""
    batch, heads, tokens, dim = k.shape
    part = min(APPENDED, power_of_two(tokens))
    balanced, programs = _to_balance(queries)
    if queries is not None and programs + batch * heads > MOST_PAIRS:
        launch_append_tokens(k, v, store, starts, nonfinite, counters, balance)
        return balanced_queries(queries, balance)
    launch(
        append_kernel, k, (-(-tokens // part), programs + pairs_of(batch, heads)),
        NewTokens(k, v, k.stride(), v.stride()), balance, balanced,
        (store.k_open, store.v_open, store.k_scale, store.v_scale), store.open_len,
        starts, nonfinite, counters, tokens,
        store.k_open.shape[2], HEADS=heads, D=dim, DP=power_of_two(dim), TOKENS=part,
        num_warps=_warps(dim), enable_fp_fusion=False,
    )  # fmt: skip
    return None if balanced is None else balanced.out


def launch_seal_open(store: KVStore, blocks: int, moves: bool = False) -> None:
    """`StoreOps.seal_open`."""
    batch, heads, cap, _ = store.k_open.shape
    held = (store.k_open, store.v_open, store.k_scale, store.v_scale, 1, cap)
    # products must round as the reference's do, so that a block has the same bits wherever it is sealed
    launch(
        seal_open_kernel, store.k_open, (blocks, pairs_of(batch, heads)),
        tuple(pages[1:] for pages in store.paged), (held,) * len(store.paged),
        held[:4] if moves else None,
        Rows(store.order.contiguous(), store.sealed, store.open_len, None), store.table,
        store.table.stride(0), cap,
        FORM=_form_of(store), num_warps=_warps(store.k_open.shape[3]), enable_fp_fusion=False,
    )  # fmt: skip


def launch_exchange_open(
    blocks: tuple[torch.Tensor, ...], slots: tuple[torch.Tensor, ...], requests: tuple[torch.Tensor, ...], at: int
) -> None:
    """`StoreOps.exchange_open`. requests: slot, first, last and held."""
    (_, heads, block, dim), channels = blocks[0].shape, blocks[1].shape[2]
    part = min(EXCHANGED, power_of_two(max(dim, channels)))
    launch(
        exchange_open_kernel, requests[0], (len(requests[0]) * heads, -(-max(dim, channels) // part)),
        blocks, slots, *requests, slots[0].shape[2],
        HEADS=heads, D=dim, V=channels, PART=part, BLOCK=block, PADDED=power_of_two(block), AT=at,
    )  # fmt: skip


def launch_append_step(
    k: torch.Tensor,
    v: torch.Tensor,
    store: KVStore,
    noted: tuple[torch.Tensor, torch.Tensor] | None,
    nonfinite: torch.Tensor,
    arrived: torch.Tensor,
    balance: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`StoreOps.append_step`; queries and what is returned of them: as in `launch_append_tokens`."""
    batch, heads = k.shape[:2]
    form = _form_of(store)
    balanced, programs = _to_balance(queries)
    launch(
        append_step_kernel, k, (programs + batch * heads,),
        NewTokens(k, v, k.stride(), v.stride()), balance, balanced, cache_of(store),
        Rows(store.order.contiguous(), store.sealed, store.open_len, None), store.table,
        None if noted is None else (noted[0], noted[1].contiguous(), noted[0].shape[2]), nonfinite, arrived,
        store.table.stride(0), FORM=form, num_warps=_warps(form.dim), enable_fp_fusion=False,
    )  # fmt: skip
    return None if balanced is None else balanced.out


def launch_select_rows(tensors: Sequence[torch.Tensor], words: Sequence[int], rows: Sequence[int]) -> None:
    """`StoreOps.select_rows`; words: those of a row of each tensor."""
    device, padded = tensors[0].device, power_of_two(len(rows))
    of_each = [number for x, count in zip(tensors, words, strict=True) for number in (x.data_ptr(), count)]
    part = max(16, MOVED // padded)
    launch(
        select_rows_kernel, tensors[0], (-(-max(words) // part), len(tensors)),
        shared(of_each, device), shared(rows, device), ROWS=len(rows), PADDED=padded, WORDS=part,
    )  # fmt: skip


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
                RANK=rank, ROTARY=rotary.shape[-1], num_warps=4, enable_fp_fusion=False,
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
