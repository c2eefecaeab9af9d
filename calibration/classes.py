"""Find the class of transformers that builds the model of a configuration."""

from __future__ import annotations

from typing import Any


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
