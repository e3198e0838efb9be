"""Options of `turbo_hf.patch`, by name and from files; files that are written whole."""

from turbo_hf.config.turbo_config import PRESETS as PRESETS
from turbo_hf.config.turbo_config import Expert as Expert
from turbo_hf.config.turbo_config import SparseConfig as SparseConfig
from turbo_hf.config.turbo_config import TurboConfig as TurboConfig
