"""Ops that store tokens: new ones into the open buffer, whole blocks into pages, rows and slots from place to place."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from turbo_hf.layout import KVStore
from turbo_hf.ops import gpu
from turbo_hf.ops.backend import Choice, uses_triton
from turbo_hf.ops.checks import check_shape
from turbo_hf.ops.host_device import shared
from turbo_hf.ops.maths import balanced_keys, balanced_queries
from turbo_hf.ops.store.reference import reference_append_step, reference_append_tokens, reference_seal_open

MOST_ROWS = 256
"""Rows that a program of the kernel holds in registers; above them tensors are permuted one by one."""

Opened = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""k, v, k_scale and v_scale of open tokens, as in `turbo_hf.layout.KVStore`."""


class StoreOps(Choice):
    """A layer's ops on its store. All take tensors of the layer alone."""

    def append_tokens(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        store: KVStore,
        *,
        starts: torch.Tensor | None = None,
        nonfinite: torch.Tensor,
        arrived: torch.Tensor | None = None,
        balance: torch.Tensor | None = None,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Quantize new tokens to INT8 after the open ones of `store`, in place; on a GPU in one launch, without
        waiting.

        In a store with 16-bit heads, they are appended unquantized, with scale 1.

        Args:
            k, v: float [B, Hkv, M, D]; of latent attention, latent and rotary part (`turbo_hf.layout`).
            store: one layer's cache, with capacity for M more open tokens per row; k_open, v_open, their scales and
                open_len change.
            starts: int64 [B], the first column that holds a token of the row; None: all do.
            nonfinite: int32 [1], set to 1 if a token contains NaN or Inf, else left unchanged.
            arrived: int32 [B], zeros before and after: scratch space of a launch that will be replayed; None: that of
                the stream.
            balance: float32 [Hkv, D], what keys are divided by on the way (`layout`); not of latents. None: by nothing.
            queries: float [B, Hq, M, D], of these tokens, to be multiplied by the balance in the same launch.

        Returns:
            `queries` as `ops.maths.balanced_queries` leaves them; None without.

        Raises:
            ValueError: keys, values or queries that do not match the store's.

        Source: INT-FlashAttention alg. 1 (token-level scales).
        """
        _check_new(k, v, store, queries)
        if self.store_kernels:
            from turbo_hf.ops.store.launch import launch_append_latents, launch_append_tokens  # noqa: PLC0415 - Triton

            if self.rotary_dim is not None:
                launch_append_latents(k, v, store, starts, nonfinite)
                return None
            counters = _counters(len(k), k.device, gpu.stream(k.device)) if arrived is None else arrived
            return launch_append_tokens(k, v, store, starts, nonfinite, counters, balance, queries)
        k = balanced_keys(k, balance)
        reference_append_tokens(k, v, store, starts=starts, nonfinite=nonfinite)
        return None if queries is None else balanced_queries(queries, balance)

    def append_step(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        store: KVStore,
        *,
        noted: tuple[torch.Tensor, torch.Tensor] | None = None,
        nonfinite: torch.Tensor,
        arrived: torch.Tensor,
        balance: torch.Tensor | None = None,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Seal each row's oldest open block if it is due, then append one token to each row; on a GPU in one launch.

        The tensors alone determine what it does, so the launch can be replayed: the host only has to write the page of
        a row's next block into the table.

        Args:
            k, v: float [B, Hkv, 1, D].
            store: one layer's cache of INT8 open tokens, or of latents, with room for `first + block + recent` open
                tokens per row. A row has no more; if it has that many, `table[row, sealed[row]]` is a page of its own.
                The pages, the open tokens, their scales, sealed and open_len change.
            noted: the index int16 [B, Hkv, places], with a place for every token of a row, and the buckets of the new
                tokens int16 [B, Hkv, 1], which are written to their place in it. None: tokens have no buckets.
            nonfinite: int32 [1], set to 1 if a token contains NaN or Inf, else left unchanged.
            arrived: int32 [B], zeros before and after: scratch space of this launch.
            balance, queries: as in `append_tokens`.

        Returns:
            As `append_tokens`.

        Raises:
            ValueError: keys, values or queries that are not one token of each row of the store.

        Source: TurboAttention alg. 2 (decode: quantize, and compress the buffer once it is full).
        """
        _check_new(k, v, store, queries, 1)
        if self.store_kernels:
            from turbo_hf.ops.store.launch import launch_append_step, launch_latent_step  # noqa: PLC0415 - needs Triton

            if self.rotary_dim is not None:
                launch_latent_step(k, v, store, nonfinite)
                return None
            return launch_append_step(k, v, store, noted, nonfinite, arrived, balance, queries)
        k = balanced_keys(k, balance)
        reference_append_step(k, v, store, noted=noted, nonfinite=nonfinite)
        return None if queries is None else balanced_queries(queries, balance)

    def seal_open(self, store: KVStore, blocks: int, moves: bool = False) -> None:
        """Seal the whole blocks of open tokens, between the `first` and the `recent` ones, into the pages that the
        table names; on a GPU in one launch, without waiting.

        Args:
            store: one layer's cache, whose table and `sealed` already count these blocks: the `(open_len - first -
                recent) // block` of row r are the last ones before entry `sealed[r]` of its row of the table; blocks
                that would lie before entry 0 are left out. The pages change; `k_open` [B, Hkv, cap, D] and the other
                open tokens do not, unless they move.
            blocks: the largest number of whole blocks of any row.
            moves: whether the open tokens behind a block that is sealed take its place; of one block at most. open_len
                stays.

        Returns:
            None.

        Raises:
            ValueError: "triton" where no kernel runs.

        Source: TurboAttention eq. 5, 6, alg. 1, over tokens that are divided by their root mean square first; a
        channel's range is stored in whole units, its step is not rounded.
        """
        if not self.store_kernels:
            reference_seal_open(store, blocks, moves)
            return
        from turbo_hf.ops.store.launch import launch_seal_latents, launch_seal_open  # noqa: PLC0415 - needs Triton

        (launch_seal_open if self.rotary_dim is None else launch_seal_latents)(store, blocks, moves)

    def exchange_open(
        self,
        blocks: Opened,
        slots: Opened,
        slot: torch.Tensor,
        first: torch.Tensor,
        last: torch.Tensor,
        held: torch.Tensor,
        at: int = 0,
    ) -> None:
        """Each request's first block begins with the tokens that its slot holds; then the slot holds its last block.

        Args:
            blocks: k [N, Hkv, b, D] and v [N, Hkv, Dv, b] of any types, float32 scales [N, Hkv, b]; contiguous. The
                first `held` tokens of each request's first block change.
            slots: the same of S slots, with room for b tokens from `at` on. Those of the requests change.
            slot, first, last: int64 [R], of each request its slot, and its first and last row among `blocks`. Requests
                without tokens may share a slot and a row.
            held: int64 [R], the tokens that the slot holds there: b at most.
            at: where these tokens begin in a slot.

        Returns:
            None.

        Raises:
            ValueError: "triton" where no kernel runs.
        """
        if self.store_kernels:
            from turbo_hf.ops.store.launch import launch_exchange_open  # noqa: PLC0415 - needs Triton

            launch_exchange_open(blocks, slots, (slot, first, last, held), at)
            return
        block = blocks[0].shape[2]
        here, places = torch.arange(block, device=slot.device) < held[:, None, None], slice(at, at + block)
        for x, y, is_codes in zip(_tokens_last(blocks), _tokens_last(slots), (True, True, False, False), strict=True):
            before, new = y.index_select(0, slot)[..., places], x.index_select(0, first)
            x.index_copy_(0, first, torch.where(here[:, :, None] if is_codes else here, before, new))
            y[..., places].index_copy_(0, slot, x.index_select(0, last))

    def select_rows(self, tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Row i of each tensor becomes what its row `rows[i]` was, in place; on a GPU in one launch for all tensors.

        Args:
            tensors: [B, ...] each, contiguous, of any dtype, all on one device; none twice.
            rows: B row numbers from 0 to B - 1; a row may be named several times, or not at all.

        Returns:
            None.

        Raises:
            ValueError: "triton" where no kernel runs.
        """
        if not tensors:
            return
        device = tensors[0].device
        row_bytes = [x.nbytes // len(rows) for x in tensors]
        reason = gpu.why_no_kernels_on(device)
        if reason is None and (len(rows) > MOST_ROWS or any(size % 4 for size in row_bytes)):
            reason = f"it serves at most {MOST_ROWS} rows of whole 32-bit words"
        if uses_triton(self.backend, device, reason):
            from turbo_hf.ops.store.launch import launch_select_rows  # noqa: PLC0415 - needs Triton

            launch_select_rows(tensors, [size // 4 for size in row_bytes], rows)
            return
        index = shared(rows, device)
        for x in tensors:
            x.copy_(x[index])


def _check_new(
    k: torch.Tensor, v: torch.Tensor, store: KVStore, queries: torch.Tensor | None, tokens: int | str = "M"
) -> None:
    """ValueError unless what a model brings is `tokens` new tokens of each row of the store."""
    (batch, heads, _, dim), device = store.k_open.shape, store.k_open.device
    check_shape("k", k, (batch, heads, tokens, dim), device)
    check_shape("v", v, (*k.shape[:3], store.v_open.shape[2]), device)
    if queries is not None:
        check_shape("queries", queries, (batch, "Hq", k.shape[2], dim), device)
        if queries.shape[1] % heads:
            raise ValueError(f"queries must be of a multiple of {heads} heads; got {queries.shape[1]}.")


@lru_cache(maxsize=32)
def _counters(rows: int, device: torch.device, stream: int) -> torch.Tensor:
    """int32 [B], zeros before and after each launch. Launches on one stream run one after another."""
    return torch.zeros(rows, dtype=torch.int32, device=device)


def _tokens_last(opened: Opened) -> Opened:
    """Their last dimension is then that of tokens."""
    k, v, k_scale, v_scale = opened
    return k.transpose(2, 3), v, k_scale, v_scale
