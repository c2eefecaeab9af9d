"""From a model, machines, a load and a version of vLLM to a launch."""
