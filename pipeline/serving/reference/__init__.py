"""The reference runtime: a checkpoint answers through lm-eval and transformers, computed as its format means it.

For formats that no vLLM here loads. Weights are what the stored bytes stand for, in float32; the inputs of quantized
layers, and K and V on their way into the cache, are rounded as the scheme says. It measures accuracy and no throughput,
in a process of its own, `python -m quantmint.pipeline.serving.reference`, that a run talks to over a socket.
"""
