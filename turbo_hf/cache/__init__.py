"""The compressed KV cache: one `TurboLayer` per layer, with sealed pages and an open buffer."""

from turbo_hf.cache.turbo_cache import TurboCache as TurboCache
