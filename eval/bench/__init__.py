"""`turbo-hf bench`: how fast the attention of a prompt is and how far from exact, on shapes of real models."""
