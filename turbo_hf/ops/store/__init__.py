"""Storing keys and values: quantized tokens, sealed pages."""
