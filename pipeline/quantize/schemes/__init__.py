"""Quantization schemes: one module a family, each scheme one object."""
