"""From what a person asks to be served to a launch plan: the model found, its facts read, the target and load named."""
