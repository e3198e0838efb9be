"""Several processes that hold one cache."""
