"""Serving a checkpoint with vLLM: what the hardware can load, the plan of a launch, the launch itself."""
