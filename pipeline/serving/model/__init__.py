"""The facts about a model that serving depends on: sizes, weights, quantization."""
