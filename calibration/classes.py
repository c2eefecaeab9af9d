"""Find the classes of transformers that read a model's config.json and build the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ALIASES = {"kimi_k2": "deepseek_v3", "kimi_k25": "kimi_k25"}
"""Model types of releases that bring code for them, by the type of transformers that they are; vLLM 0.32 has the same
(vllm/transformers_utils/config.py)."""


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a folder, as transformers reads it.

    Kimi's models are read as the types of transformers that they are, also where their code is trusted: the tokenizer
    needs it, and the model does not. Raises what transformers raises.
    """
    import transformers

    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = _ALIASES.get(str(fields.get("model_type")))
    if kind is None:
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    values = {name: value for name, value in fields.items() if name not in ("auto_map", "model_type")}
    return transformers.AutoConfig.for_model(kind, **values)


def build_model(config: Any, **options: Any) -> Any:
    """Build the architecture that a configuration names, by its `auto_class` or else by the architecture's name.

    ``options`` are passed to ``from_config``; no weights are read.
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

    Text-only models are causal language models. Models that also see or hear are built whole where the configuration
    names the whole class, or where transformers has no class for their text part alone.
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
