"""Storing keys and values: quantized tokens, sealed pages, and the rotation of keys."""
