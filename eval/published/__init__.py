"""Published caches, simulated in plain torch: accuracy only."""
