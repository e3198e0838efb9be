"""Attention of several new tokens per row, over themselves and over what the cache holds."""

from turbo_hf.ops.prefill.contract import prefill as prefill
