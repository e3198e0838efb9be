"""The contract of every op: shapes, units, errors, source; checks its arguments, then runs the fastest backend."""
