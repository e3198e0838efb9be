"""The meaning of every op, in plain torch: same names and signatures as `turbo_hf.ops`."""
