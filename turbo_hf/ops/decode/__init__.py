"""Attention of one or a few new tokens per row over the cache."""
