"""Attention of one or a few new tokens per row over the cache."""

from turbo_hf.ops.decode.contract import decode as decode
