"""Decode steps that read only the buckets that a selector has chosen."""

from turbo_hf.ops.sparse.decode import sparse_decode as sparse_decode
