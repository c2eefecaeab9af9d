"""The reference runtime: evaluate a checkpoint through lm-eval and transformers, with the arithmetic of its format.

It is for formats that the installed vLLM cannot load. Weights are dequantized to float32; inputs of quantized layers,
and keys and values before they enter the cache, are rounded as the scheme specifies. It measures accuracy, not
throughput. It runs as its own process, `python -m quantmint.pipeline.serving.reference`, and answers over a socket.
"""
