"""Types, options and modes that several tests of attention go through."""

from typing import Any

import pytest
import torch

from turbo_hf.config.turbo_config import ABLATIONS, ATTENTION_MODES, PRESETS, TurboConfig, with_options

EVERY_PRESET = PRESETS | ABLATIONS
"""Those that can be named."""


def flat_config(**options: Any) -> TurboConfig:
    """A config of options by name, those of `Expert` among them."""
    return with_options(TurboConfig(), **options)


MODES = [pytest.param(mode, id=mode) for mode in ATTENTION_MODES]
TWO_MODES = [pytest.param(mode, id=mode) for mode in ("native", "turbo")]
"""Nothing rounded but what the cache holds, and all of it in INT8."""


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FLOATS]
OPTIONS = [
    pytest.param({"window": 1}, id="window1"),
    pytest.param({"window": 20}, id="window20"),
    pytest.param({"window": 64}, id="window64"),
    pytest.param({"window": 100}, id="window100"),
    pytest.param({"window": 1000}, id="window1000"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"window": 70, "softcap": 5.0, "sinks": True}, id="all"),
]
