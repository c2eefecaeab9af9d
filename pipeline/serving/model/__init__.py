"""What a model is, as far as serving it depends on it."""
