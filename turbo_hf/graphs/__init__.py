"""Decode steps captured in a CUDA graph and replayed."""
