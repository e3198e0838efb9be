"""Patching a model, and making it as it was: `patch_model.patch` is `turbo_hf.patch`."""
