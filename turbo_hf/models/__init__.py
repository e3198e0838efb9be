"""What the modules and the source of a Transformers model tell."""
