"""What a model consists of, asked of the model itself."""
