"""`turbo-hf bench`: how fast attention and generation are and how far from exact, on shapes of real models."""
