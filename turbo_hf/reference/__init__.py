"""What every op of `turbo_hf.ops` computes, under its name, in plain torch; arguments are checked there."""
