"""Attention of several new tokens per row, over themselves and over what the cache holds."""
