"""Kernels of our own for GPUs, in the language that CUDA and HIP share."""
