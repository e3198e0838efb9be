"""Decode steps that read only the buckets that a selector has chosen."""
