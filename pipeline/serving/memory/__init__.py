"""Whether a model fits, and how many tokens of KV cache are left."""
