"""Ops. Each documents its contract (shapes, units, errors, source), checks its arguments, then runs the fastest
backend."""
