"""What Transformers calls for attention: the attention function, its masks, and the sparse decode step."""
