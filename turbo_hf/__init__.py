"""Attention on a compressed KV cache for Hugging Face Transformers: `turbo_hf.patch(model)`."""

from turbo_hf.cache import TurboCache
from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.run import calibrate
from turbo_hf.config import PRESETS, SparseConfig, TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.handle import Handle
from turbo_hf.patching import patch

__all__ = [
    "PRESETS",
    "Calibration",
    "Handle",
    "SparseConfig",
    "TurboCache",
    "TurboConfig",
    "Unsupported",
    "calibrate",
    "patch",
]
