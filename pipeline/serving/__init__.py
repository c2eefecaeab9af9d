"""Serve a checkpoint with vLLM: facts about model and machine, the launch plan, the running servers."""
