"""RMSNorm (Zhang and Sennrich 2019) in one launch. Imported only where one runs, as it needs Triton."""

import torch
import triton
import triton.language as tl

from turbo_hf.layout import power_of_two
from turbo_hf.ops import gpu
from turbo_hf.ops.kernel_launch import launch


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [rows, DIM]
    weight_ptr,  # [DIM], or None
    out_ptr,  # [rows, DIM]
    stride, eps,
    PLUS: tl.constexpr, EARLY: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Each program takes a row. PLUS, EARLY: as in `Form`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    live = at < DIM
    x = tl.load(x_ptr + row * stride + at, live, other=0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    if EARLY:
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        out *= tl.load(weight_ptr + at, live, other=0).to(tl.float32) + PLUS
    tl.store(out_ptr + row * DIM + at, out, live)


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, plus: int, early: bool) -> torch.Tensor:
    """As `reference_norm`, for x [..., dim] and weight [dim] of one dtype, without gradients."""
    # as operators of torch do, it keeps the order of dimensions in memory
    out, dim = torch.empty_like(x), x.shape[-1]
    if not out.is_contiguous():
        return out.copy_(launch_rms_norm(x.contiguous(), weight, eps, plus, early))
    rows = x.reshape(-1, dim)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.numel():
        padded = power_of_two(dim)
        constants = {"PLUS": plus, "EARLY": early, "DIM": dim, "PADDED": padded}
        warps = min(max(padded // 256, 1), 16)
        given = rows, weight, out, rows.stride(0), eps
        launch(rms_norm_kernel, x, (len(rows),), *given, **constants, num_warps=warps, **gpu.FMA)
    return out
