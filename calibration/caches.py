"""Caches of the class and layout that a model makes for itself: K and V, recurrent states, indexers, windows."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from calibration.errors import CalibrationError
from calibration.lazy import torch
from calibration.measurement import Measurement
from calibration.parts import trunk_of


def empty_cache(model: Any) -> Any:
    """Return an empty cache with a layer for each of the model's, as its configuration lays them out."""
    kind = _cache_class(type(trunk_of(model)))
    if "config" not in kind.__init__.__code__.co_varnames:
        return kind()
    try:
        return kind(config=model.config)
    except (AttributeError, KeyError):  # a configuration that does not say what its layers are: all hold K and V
        return kind()


@cache
def _cache_class(trunk: type) -> Any:
    """Return the class of caches that a model's own module defines, or that of all others."""
    from transformers import DynamicCache

    defined = [
        value
        for value in vars(sys.modules[trunk.__module__]).values()
        if isinstance(value, type) and issubclass(value, DynamicCache) and value.__module__ == trunk.__module__
    ]
    return defined[0] if defined else DynamicCache


def recording_cache(model: Any, measurement: Measurement) -> Any:
    """Return an empty cache that adds the keys and values that it is given to a measurement.

    It keeps none of them where it would only hand back what it is given. Its ``update`` raises `CalibrationError` outside
    of the attention modules that the measurement watches.
    """
    found = empty_cache(model)
    update = found.update

    def recorded(keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        attention = measurement.attention
        if attention is None:
            raise CalibrationError(f"layer {layer_idx} caches K and V that no known attention module has made")
        measurement.cached(attention, keys, values)
        return (keys, values) if _hands_back(found, layer_idx) else update(keys, values, layer_idx, *args, **kwargs)

    found.update = recorded
    return found


def _hands_back(found: Any, layer: int) -> bool:
    """Whether a layer of an empty cache only returns what it is given; others may be read by their attention again."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    kind = type(found.layers[layer]) if layer < len(found.layers) else found.layer_class_to_replicate
    return kind in (DynamicLayer, DynamicSlidingWindowLayer)
