"""What a sparse decode step reads: selectors, and the buckets of a layer's tokens."""
