"""Plain torch implementations of all ops of `turbo_hf.ops`, under the same names; arguments are checked there."""
