"""GPTQ layer by layer: a loop over layers that collects statistics, solves for weights and applies them."""
