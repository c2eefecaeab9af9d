"""The model that a folder's ``config.json`` describes, built without its weights, and the names that it has on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError, first_line


def meta_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Build the language model of a folder on the meta device: no weights, no memory.

    A checkpoint that was saved with more than the language model, a vision tower say, is built as the class that it
    names, so that every tensor has its module. Raises `UserError` where transformers does not know the architecture.
    """
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        # A quantized checkpoint is inspected as the model it was made from.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
        raise UserError(
            f"{folder}: transformers cannot build this model from its config.json: {first_line(error)}"
        ) from None


def _auto_class(config: Any) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    named = getattr(config, "architectures", None) or ()
    return AutoModelForImageTextToText if getattr(wrapper, "__name__", None) in named else AutoModelForCausalLM


class Renaming:
    """The rules that transformers loads this model's checkpoints with: a name on disk becomes a parameter's."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def __call__(self, name: str) -> tuple[str, tuple[Any, ...]]:
        """The parameter that a tensor becomes (a part of), and the operations of transformers that make it so."""
        from transformers.core_model_loading import rename_source_key

        own, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._parameters)
        return own, () if pattern is None else tuple(self._by_pattern[pattern].operations)


def stored_tensors(model: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name on disk, dtype and shape of each tensor that transformers would save in bfloat16, tied ones once.

    What a model insists on having in float32, DeepSeek's correction of its router, is that.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    wide = frozenset(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return {
        name: ("BF16" if wide.isdisjoint(name.split(".")) else "F32", tuple(tensor.shape))
        for name, tensor in revert_weight_conversion(model, state).items()
    }
