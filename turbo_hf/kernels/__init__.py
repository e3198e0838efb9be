"""Triton kernels. Imported by the ops when they launch one, so that importing turbo_hf needs no Triton."""
