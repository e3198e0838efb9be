"""Attention on a compressed KV cache for Hugging Face Transformers: `turbo_hf.patch(model)`.

Messages that are no warnings (strict "fallback") go to loggers below "turbo_hf", at level INFO.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from turbo_hf._version import __version__ as __version__

if TYPE_CHECKING:
    from turbo_hf.cache.turbo_cache import TurboCache
    from turbo_hf.calibration.artifacts import Calibration
    from turbo_hf.calibration.run import calibrate
    from turbo_hf.chat import Chat
    from turbo_hf.config.turbo_config import PRESETS, Expert, SparseConfig, TurboConfig
    from turbo_hf.errors import Unsupported
    from turbo_hf.patching.handle import Handle
    from turbo_hf.patching.patch_model import patch

__all__ = [
    "PRESETS",
    "Calibration",
    "Chat",
    "Expert",
    "Handle",
    "SparseConfig",
    "TurboCache",
    "TurboConfig",
    "Unsupported",
    "calibrate",
    "patch",
]

HOMES = {
    "PRESETS": "turbo_hf.config.turbo_config",
    "Calibration": "turbo_hf.calibration.artifacts",
    "Chat": "turbo_hf.chat",
    "Expert": "turbo_hf.config.turbo_config",
    "Handle": "turbo_hf.patching.handle",
    "SparseConfig": "turbo_hf.config.turbo_config",
    "TurboCache": "turbo_hf.cache.turbo_cache",
    "TurboConfig": "turbo_hf.config.turbo_config",
    "Unsupported": "turbo_hf.errors",
    "calibrate": "turbo_hf.calibration.run",
    "patch": "turbo_hf.patching.patch_model",
}
"""The module of each public name, imported at its first use: torch and Transformers take seconds, which the help of the
command line does not need."""

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
