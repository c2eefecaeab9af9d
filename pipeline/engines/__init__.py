"""What makes quantized checkpoints."""
