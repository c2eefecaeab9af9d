"""The structure of a model, read from the model itself."""
