"""Parts of a language model that calibration addresses: its trunk, its layers, its attention modules.

They are found by what their code does and takes, not by the names of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from quantmint.calibration.errors import CalibrationError, NotReplayableError
from quantmint.calibration.lazy import torch

_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Names by which forwards of transformers take a cache."""


def language_model(model: Any) -> Any:
    """Return the part of a model that processes text.

    That is the first child of a model without a forward of its own (the thinker of an Omni model), and the decoder of a
    model that cannot be called without an image (BLIP-2); else the model itself.
    """
    while type(model).forward is torch.nn.Module.forward:
        model = next(model.children())
    return model.get_decoder() if _requires_more_than_tokens(type(model).forward) else model


def head_name(model: Any) -> str:
    """Return the name of the output head of the part that processes text."""
    output = language_model(model).get_output_embeddings()
    name: str = next(name for name, module in model.named_modules() if module is output)
    return name


def trunk_of(model: Any) -> Any:
    """Return the model without its output head: the logits, the largest tensor of a forward, are not needed."""
    model = language_model(model)
    base = model.base_model
    # Llama 4's text has the base's name of the model that also sees.
    return model.model if base is model and hasattr(model, "model") else base


@cache
def _requires_more_than_tokens(forward: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = (each for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD)
    return bool({each.name for each in named if each.default is each.empty} - {"input_ids"})


def run_trunk(model: Any, batch: torch.Tensor, cache: Any) -> None:
    """Run a model without its output head on token ids, int64 [batch, sequence], with ``cache``.

    Raises `CalibrationError` where transformers cannot run it on text alone.
    """
    trunk = trunk_of(model)
    parameters = inspect.signature(trunk.forward).parameters
    argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), _CACHE_ARGUMENTS[0])
    with running("this model on text alone"):
        trunk(input_ids=batch, use_cache=True, **{argument: cache})


@contextmanager
def running(what: str) -> Iterator[None]:
    """Within the block, turn errors of a forward of transformers into `CalibrationError`, except a lack of memory.

    ``what`` names the part that runs, for the message.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CalibrationError(f"transformers cannot run {what}: {reason}") from error


def layer_names(model: Any) -> list[str]:
    """Return the names of the decoder's layers, in order.

    Layers are the elements of the outermost `ModuleList` that contains a module that takes a cache. Raises
    `NotReplayableError` if there is not exactly one such list, if layers share weights, or if nothing is written into
    the cache.
    """
    if (reason := text_obstacle(model)) is not None:
        raise NotReplayableError(reason)
    users = [name for name, module in _language_modules(model) if _takes_cache(type(module).forward)]
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


def text_obstacle(model: Any) -> str | None:
    """Return why a model cannot be measured on text alone, as part of a sentence; None if it can.

    The decoder of a diffusion model takes a cache that another part fills, and refines random tokens.
    """
    users = [module for _, module in _language_modules(model) if _takes_cache(type(module).forward)]
    written = any(name.startswith(("update", "set_")) for module in users for name in _names(type(module).forward))
    return None if written else "its decoder writes nothing into the cache that it reads"


def _require_own_weights(model: Any, layers: list[str]) -> None:
    owner: dict[int, str] = {}
    for layer in layers:
        for name, parameter in model.get_submodule(layer).named_parameters():
            if owner.setdefault(id(parameter), layer) != layer:
                other = owner[id(parameter)]
                raise NotReplayableError(f"its layers share weights: {layer}.{name} is also a weight of {other}")


def attention_modules(model: Any) -> tuple[str, ...]:
    """Return the names of the modules of the language part that hand keys and values to a cache (`hands_keys`)."""
    return tuple(name for name, module in _language_modules(model) if hands_keys(module))


def shared_attention(model: Any) -> dict[str, str]:
    """Map each attention module that uses another module's keys and values to that other module.

    The mapped modules are in the last ``num_kv_shared_layers`` layers of the configuration; each uses the keys and
    values of the last earlier layer of its type.
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


def hands_keys(module: Any) -> bool:
    """Return whether a module's forward takes a cache and calls its ``update``."""
    return _hands_keys(type(module).forward)


@cache
def _hands_keys(forward: Callable[..., Any]) -> bool:
    return _takes_cache(forward) and "update" in _names(forward)


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the globals and attributes that a forward uses; () where its code cannot be found."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code.co_names if code is not None else ()


@cache
def _takes_cache(forward: Callable[..., Any]) -> bool:
    return any(name in _CACHE_ARGUMENTS for name in inspect.signature(forward).parameters)
