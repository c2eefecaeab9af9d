"""Plan a launch from a model, machines, a load and a version of vLLM."""
