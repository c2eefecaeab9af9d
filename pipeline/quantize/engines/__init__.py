"""The engines that make quantized checkpoints."""
