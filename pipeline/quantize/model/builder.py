"""Build a model of transformers on the meta device from its config.json: modules and shapes, no weights, no memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError, first_line

# Packages that transformers imports where they are installed, for features that nobody uses here: assisted generation,
# an event loop, Amazon's API. They would take a third of the start of a process.
_HEAVY = ("sklearn", "trio", "boto3")


def meta_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Build the language model of a folder on the meta device.

    A checkpoint that was saved with more than the language model, a vision tower say, is built as the class that its
    config.json names, so that every tensor has its module. Raises `UserError` where transformers cannot build it.
    """
    with light_imports():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401  # the class that is built below

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        # A quantized checkpoint is inspected as the model that it was made from.
        for part in (config, config.get_text_config()):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        with torch.device("meta"):
            model = build_model(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever makes transformers stumble over a config.json is a fault of that file
        raise UserError(
            f"{folder}: transformers cannot build this model from its config.json: {first_line(error)}"
        ) from None
    _require_matrices(folder, model)
    return model


def _require_matrices(folder: Path, model: Any) -> None:
    """Raise `UserError` for a linear module whose sizes are not numbers: PyTorch takes a list on the meta device."""
    import torch

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module.weight.ndim != 2:
            raise UserError(
                f"{folder}: config.json gives {name} a weight of {list(module.weight.shape)}, expected a matrix."
            )


def build_model(config: Any, **options: Any) -> Any:
    """Build the architecture that a configuration names, without weights, by `auto_class`.

    A class of transformers that no auto class leads to is taken by its name.
    """
    import transformers

    kind = auto_class(config)
    if type(config) not in kind._model_mapping:
        for name in getattr(config, "architectures", None) or ():
            named = getattr(transformers, name, None)
            if named is not None and isinstance(config, getattr(named, "config_class", None) or ()):
                options.pop("trust_remote_code", None)
                return named._from_config(config, **options)
    return kind.from_config(config, **options)


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers that builds the architecture named in a configuration.

    Models of text alone are causal language models; those that also see or hear are built whole where their
    config.json names the whole class, or where transformers knows no class for their text alone.
    """
    import transformers

    causal = transformers.AutoModelForCausalLM
    named = set(getattr(config, "architectures", None) or ())
    for whole in (transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM):
        wrapper = whole._model_mapping.get(type(config), None)
        unknown = type(config) not in causal._model_mapping
        if wrapper is not None and (wrapper.__name__ in named or (unknown and not hasattr(config, "auto_map"))):
            return whole
    return causal


@contextmanager
def light_imports() -> Iterator[None]:
    """Import without `_HEAVY` and without garbage collection, which imports do not need and which takes a sixth."""
    absent = [name for name in _HEAVY if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # Python's own sign for "cannot be imported"
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name)
        if collecting:
            gc.freeze()  # modules stay for good: the collector need not look through them again
            gc.enable()


def decoder_prefix(model: Any) -> str:
    """Return the name of the module that holds the layers of the language model; "" where the model is that module."""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def stored_tensors(model: Any) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Name on disk, dtype and shape of each tensor that transformers would save in bfloat16, tied ones once.

    Tensors that a model class insists on having in float32, such as the correction of DeepSeek's router, are F32.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    wide = frozenset(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return {
        name: ("BF16" if wide.isdisjoint(name.split(".")) else "F32", tuple(tensor.shape))
        for name, tensor in revert_weight_conversion(model, state).items()
    }
