"""What a compressed cache does to a model's answers."""

if not __name__.startswith("turbo_hf."):
    raise ImportError("Import this package as turbo_hf.eval: under another name it would exist twice.")
