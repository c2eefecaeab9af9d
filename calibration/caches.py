"""Caches of the class and layout that a model makes for itself: K and V, recurrent states, indexers, windows."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.lazy import torch
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.parts import language_model, trunk_of


def empty_cache(model: Any) -> Any:
    """Return an empty cache for one forward, laid out by the model's configuration.

    Plain and sliding-window layers store nothing: their ``update`` returns the keys and values that it is given.
    """
    return _watched(model, lambda *_: None)


def recording_cache(model: Any, measurement: Measurement) -> Any:
    """Return an empty cache that adds all keys and values that it is given to ``measurement``.

    Its ``update`` raises `CalibrationError` where it is called outside the attention modules that the measurement
    watches.
    """

    def record(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        if measurement.attention is None:
            raise CalibrationError(f"layer {layer} caches K and V that no known attention module has made")
        measurement.cached(measurement.attention, keys, values)

    return _watched(model, record)


def _watched(model: Any, see: Callable[[torch.Tensor, torch.Tensor, int], None]) -> Any:
    """Return an empty cache that first calls ``see(keys, values, layer number)`` at each update."""
    kind, configured = _cache_class(type(trunk_of(model)).__module__)
    empty = kind(config=language_model(model).config) if configured else kind()
    update = empty.update

    def watched(key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        see(key_states, value_states, layer_idx)
        if _hands_back(empty, layer_idx):
            return key_states, value_states
        return update(key_states, value_states, layer_idx, *args, **kwargs)

    empty.update = watched
    return empty


@cache
def _cache_class(module: str) -> tuple[Any, bool]:
    """Return the cache class for a model of the Python module named, and whether the class takes a ``config``.

    It is the subclass of `DynamicCache` that the module defines, else `DynamicCache` itself.
    """
    from transformers import DynamicCache

    defined = (
        value
        for value in vars(sys.modules[module]).values()
        if isinstance(value, type) and issubclass(value, DynamicCache) and value.__module__ == module
    )
    kind = next(defined, DynamicCache)
    return kind, "config" in inspect.signature(kind).parameters


def _hands_back(cache: Any, layer: int) -> bool:
    """Return whether a layer of an empty cache only returns what it is given; attention may read others again."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    kind = type(cache.layers[layer]) if layer < len(cache.layers) else cache.layer_class_to_replicate
    return kind in (DynamicLayer, DynamicSlidingWindowLayer)
