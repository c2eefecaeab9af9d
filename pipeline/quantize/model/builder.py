"""Build a model of transformers on the meta device from its config.json: modules and shapes, no weights, no memory."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantmint.calibration.classes import build_model, read_config
from quantmint.calibration.lazy import uncollected
from quantmint.pipeline.base.errors import UserError, first_line

# Packages that transformers imports where they are installed, for features that nobody uses here: losses of object
# detection, assisted generation, an event loop, Amazon's API. They would take a third of the start of a process.
_HEAVY = ("scipy", "sklearn", "trio", "boto3")


def meta_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Build the language model of a folder on the meta device.

    A checkpoint that was saved with more than the language model, a vision tower say, is built as the class that its
    config.json names, so that every tensor has its module. Raises `UserError` where transformers cannot build it, or
    where a linear module's weight is no matrix.
    """
    with light_imports():
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401  # what is built below

    try:
        config = read_config(folder, trust_remote_code=trust_remote_code)
        # A quantized checkpoint is inspected as the model that it was made from.
        for part in (config, config.get_text_config()):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        with torch.device("meta"):
            model = build_model(
                config,
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=trust_remote_code,
            )
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


@contextmanager
def light_imports() -> Iterator[None]:
    """Within the block, imports skip the packages `_HEAVY` and run without garbage collection, see `uncollected`.

    Both are restored at the end of the block: afterwards these packages can be imported as before. Where transformers
    was imported earlier no package is skipped: it remembers which ones are there, and its imports of them would fail.
    """
    absent = [name for name in _HEAVY if "transformers" not in sys.modules and name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # Python's own sign for "cannot be imported"
    try:
        with uncollected():
            yield
    finally:
        for name in absent:
            if sys.modules.get(name, sys) is None:  # still ours: meanwhile somebody may have put a module there
                del sys.modules[name]


def decoder_prefix(model: Any) -> str:
    """Return the name of the module that holds the language model's layers; "" where that is the model itself.

    Where transformers knows no decoder in a model, it is the module ``model`` beside the output head.
    """
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    decoder = names.get(id(model.get_decoder()), "")
    if decoder:
        return decoder
    heads = (name for name in names.values() if name.rpartition(".")[2] in ("lm_head", "embed_out"))
    # Qwen's omni models have a thinker and a talker; the language model lies beside the head of the first.
    beside = [head.rpartition(".")[0] for head in heads]
    inner = [name for name in names.values() if beside and beside[0] and name == f"{beside[0]}.model"]
    return inner[0] if inner else ""


def towers(model: Any, decoder: str, attention: Collection[str]) -> tuple[str, ...]:
    """Return the prefixes, with a final dot, of a decoder's parts that see or hear.

    These have layers of their own, and no module of ``attention`` in them; Phi-4 has its encoders of images and sounds
    in the embedding. ``decoder`` is the decoder's name.
    """
    import torch

    prefix = f"{decoder}." if decoder else ""
    children = model.get_submodule(decoder).named_children() if decoder else model.named_children()
    return tuple(
        f"{prefix}{name}."
        for name, child in children
        if not isinstance(child, torch.nn.ModuleList)
        and any(isinstance(module, torch.nn.ModuleList) for module in child.modules())
        and not any(each.startswith(f"{prefix}{name}.") for each in attention)
    )


def stored_tensors(model: Any) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Map the name on disk of each tensor that transformers would save to its dtype and shape, tied tensors once.

    The dtype is BF16; for tensors that a model class insists on having in float32, such as the correction of DeepSeek's
    router, it is F32.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    wide = frozenset(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return {
        name: ("BF16" if wide.isdisjoint(name.split(".")) else "F32", tuple(tensor.shape))
        for name, tensor in revert_weight_conversion(model, state).items()
    }
