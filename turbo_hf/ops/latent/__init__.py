"""Attention of few tokens over a cache of latents (MLA)."""
