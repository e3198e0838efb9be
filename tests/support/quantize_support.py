"""Types, lengths and codes for the tests of quantization."""

import pytest

from turbo_hf.config.expected import FLOATS
from turbo_hf.layout import BITS

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FLOATS]
ALL_BITS = [pytest.param(bits, id=f"{bits}bit") for bits in BITS]
STAGE_2 = [pytest.param(bits, id=f"{bits}bit") for bits in BITS if bits != 8]
