"""quantmint's own engine: each weight is read once, and memory is a few tensors whatever the model's size."""
