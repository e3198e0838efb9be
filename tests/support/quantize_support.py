"""Types, lengths and codes for the tests of quantization."""

import pytest
import torch

from turbo_hf.layout import BITS
from turbo_hf.ops.store.quantize import FLOATS

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FLOATS]
ALL_BITS = [pytest.param(bits, id=f"{bits}bit") for bits in BITS]
STAGE_2 = [pytest.param(bits, id=f"{bits}bit") for bits in BITS if bits != 8]


def ones(codes: torch.Tensor) -> torch.Tensor:
    return torch.ones(codes.shape[:3], dtype=torch.float32, device=codes.device)
