"""Continuous batching on compressed pages, through Transformers' own scheduler (transformers 5.19 or newer)."""
