"""Permute the rows of a cache in place, so that launches that were captured find them where they were."""

from collections.abc import Sequence

import torch

from turbo_hf.ops.backend import uses_triton
from turbo_hf.ops.gpu import why_no_kernels_on
from turbo_hf.ops.host_device import shared

MOST_ROWS = 256
"""Rows that a program of the kernel holds in registers; above them tensors are permuted one by one."""


def select_rows(tensors: Sequence[torch.Tensor], rows: Sequence[int], *, backend: str = "auto") -> None:
    """Row i of each tensor becomes what its row `rows[i]` was, in place; on a GPU in one launch for all tensors.

    Args:
        tensors: [B, ...] each, contiguous, of any dtype, all on one device; none twice.
        rows: B row numbers from 0 to B - 1; a row may be named several times, or not at all.
        backend: "auto", "triton" or "reference".

    Returns:
        None.

    Raises:
        ValueError: a tensor with another number of rows, on another device, or not contiguous; a backend that cannot
            run.
    """
    if not tensors:
        return
    device = tensors[0].device
    for x in tensors:
        if len(x) != len(rows) or x.device != device or not x.is_contiguous():
            raise ValueError(
                f"tensors must be contiguous on {device} with {len(rows)} rows; got {list(x.shape)} on {x.device}."
            )
    row_bytes = [x.nbytes // len(rows) for x in tensors]
    reason = why_no_kernels_on(device)
    if reason is None and (len(rows) > MOST_ROWS or any(size % 4 for size in row_bytes)):
        reason = f"it serves at most {MOST_ROWS} rows of whole 32-bit words"
    if uses_triton(backend, device, reason):
        from turbo_hf.ops.store.launch import launch_select_rows  # noqa: PLC0415 - needs Triton

        launch_select_rows(tensors, [size // 4 for size in row_bytes], rows)
        return
    index = shared(rows, device)
    for x in tensors:
        x.copy_(x[index])
