"""Parts of a language model that calibration addresses: its trunk, its layers, its attention modules.

They are found by what their code does and takes, not by the names of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from calibration.errors import CalibrationError, NotReplayableError
from calibration.lazy import torch

_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Names by which forwards of transformers take a cache."""


def language_model(model: Any) -> Any:
    """Return the part of a model that answers: its first where it is several that only `generate` runs, as Omni's are."""
    while type(model).forward is torch.nn.Module.forward:
        model = next(model.children())
    return model


def trunk_of(model: Any) -> Any:
    """Return the model without its output head, whose product, the largest tensor of a forward, nobody needs."""
    model = language_model(model)
    base = model.base_model
    # Llama 4's text has the base's name of the model that also sees.
    trunk = model.model if base is model and hasattr(model, "model") else base
    # Some models that also see cannot be called without an image; their text alone can.
    return model.get_decoder().base_model if _requires_more_than_tokens(type(trunk)) else trunk


@cache
def _requires_more_than_tokens(kind: type) -> bool:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]  # type: ignore[attr-defined]
    required = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD and each.default is each.empty]
    return bool(set(required) - {"input_ids"})


def run_trunk(model: Any, batch: torch.Tensor, cache: Any) -> None:
    """Run a model without its output head on tokens, int64 [batch, sequence], with a cache.

    Raises `CalibrationError` where that is not possible.
    """
    trunk = trunk_of(model)
    parameters = inspect.signature(trunk.forward).parameters
    argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), _CACHE_ARGUMENTS[0])
    with running("this model on text alone"):
        trunk(input_ids=batch, use_cache=True, **{argument: cache})


@contextmanager
def running(what: str) -> Iterator[None]:
    """Word what a forward of transformers raises in the block as `CalibrationError`, but for memory that is not there."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CalibrationError(f"transformers cannot run {what}: {reason}") from error


def layer_names(model: Any) -> list[str]:
    """Return the names of the decoder's layers, in order.

    Layers are the elements of the outermost list of modules that hold what takes a cache. Raises `NotReplayableError`
    where there is more than one such list, or none, and where layers share weights.
    """
    users = [name for name, module in _language_modules(model) if _takes_cache(type(module))]
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and any(user.startswith(f"{name}.") for user in users)
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise NotReplayableError("its layers are not one list")
    names = [f"{outer[0]}.{number}" for number in range(len(model.get_submodule(outer[0])))]
    _require_own_weights(model, names)
    return names


def _require_own_weights(model: Any, layers: list[str]) -> None:
    owner: dict[int, str] = {}
    for layer in layers:
        for name, parameter in model.get_submodule(layer).named_parameters():
            if owner.setdefault(id(parameter), layer) != layer:
                raise NotReplayableError(f"its layers share weights: {layer}.{name} is also a weight of {owner[id(parameter)]}")


def attention_modules(model: Any) -> tuple[str, ...]:
    """Return the names of the modules of a model's language part that hand keys and values to a cache."""
    return tuple(name for name, module in _language_modules(model) if hands_keys(type(module)))


def shared_attention(model: Any) -> dict[str, str]:
    """Return the attention modules that use another one's keys and values, with the name of that one.

    These are the last ``num_kv_shared_layers`` of the configuration; each uses those of the last layer of its type before
    them.
    """
    config = model.config.get_text_config(decoder=True)
    count, kinds = getattr(config, "num_kv_shared_layers", None) or 0, getattr(config, "layer_types", None) or ()
    by_layer = {getattr(model.get_submodule(name), "layer_idx", None): name for name in attention_modules(model)}
    first = len(kinds) - count
    return {
        by_layer[layer]: by_layer[max(other for other in range(first) if kinds[other] == kinds[layer])]
        for layer in range(first, len(kinds))
        if count and layer in by_layer
    }


def _language_modules(model: Any) -> Iterator[tuple[str, Any]]:
    decoder = language_model(model).get_decoder()
    inside = next(name for name, module in model.named_modules() if module is decoder)
    return ((name, module) for name, module in model.named_modules() if not inside or name.startswith(f"{inside}."))


@cache
def _takes_cache(kind: type) -> bool:
    return any(name in _CACHE_ARGUMENTS for name in inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]


@cache
def hands_keys(kind: type) -> bool:
    """Whether the forward of a class of modules calls ``update`` of a cache that it takes."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and _takes_cache(kind) and "update" in code.co_names
