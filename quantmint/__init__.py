"""quantmint: quantize a model, prove it against its source, publish it.

The one name that is installed. The folders `pipeline`, `calibration`, `eval` and `recipes` of the repository are linked
below it, so that no program that installs quantmint, and no folder that a run starts in, gets or gives a module of
such a common name.
"""
