"""Calibration: head priorities and an index for sparse decoding, from a model's own keys, values and queries.

`capture` runs the model and takes queries, keys and values; `heads` ranks KV heads for mixed precision; `index` makes
and judges the index for sparse decoding (SAAP); `artifacts` keeps all of it; `choice` is how `patch` uses it.
"""
