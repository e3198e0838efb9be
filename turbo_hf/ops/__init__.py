"""Ops. Each documents its contract (shapes, units, errors, source), checks its arguments, then runs as its layer has
chosen."""
