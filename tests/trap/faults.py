"""The faults of the trap: each is injected into a copy of a sound checkpoint, or into how that is served.

FAULTS["RoPE base"].inject(folder)   # folder is a copy that may be broken
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trap.checkpoints import SOUND, Sound

FP8_CACHE, STATIC, MIXTURE, PREDICTOR = SOUND[0], SOUND[2], SOUND[10], SOUND[12]
LAYER = 2
"""Number of the layer that faults of one layer are injected into."""


@dataclass(frozen=True)
class Fault:
    """A fault: the sound checkpoint that it is injected into, and the function that changes a copy's folder.

    ``rule`` is the inspection's rule that must name it, None for a fault that the checkpoint's files do not have.
    """

    name: str
    base: Sound
    rule: str | None
    inject: Callable[[Path], None] = lambda folder: None


def _edited(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: _edited(folder, "config.json", lambda config: config.update(values))


def _rope(**values: Any) -> Callable[[Path], None]:
    def change(config: dict[str, Any]) -> None:
        config["rope_parameters"] = {**config["rope_parameters"], **values}

    return lambda folder: _edited(folder, "config.json", change)


def _tensors(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Callable[[Path], None]:
    """Return a function that changes tensors of the file that holds them; ``change`` maps all to the new ones."""

    def inject(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        changes = 0
        for path in sorted(folder.glob("*.safetensors")):
            tensors = load_file(path)
            changed = change(tensors)
            changes += len(changed)
            save_file({**tensors, **changed}, path, metadata={"format": "pt"})
        assert changes, "the fault was not injected"

    return inject


def _scaled(pattern: str, factor: float) -> Callable[[Path], None]:
    """Return a function that multiplies the tensors whose names match."""
    return _tensors(
        lambda tensors: {name: value * factor for name, value in tensors.items() if re.search(pattern, name)}
    )


def _dead_expert(tensors: dict[str, Any]) -> dict[str, Any]:
    scales = r"layers\.1\.mlp\.experts\.1\.[a-z_]+\.weight_scale"
    return {name: value * 0 for name, value in tensors.items() if re.search(scales, name)}


def _swapped(first: str, second: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that exchanges the tensors of two modules or layers, by parts of their names."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        pairs = {name: name.replace(first, second) for name in tensors if first in name}
        return {name: tensors[other].clone() for pair in pairs.items() for name, other in (pair, pair[::-1])}

    return change


def _predictor_without_scales(folder: Path) -> None:
    """Store the predictor's linear weights in FP8, and leave their scales out."""
    import torch

    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    part = re.compile(rf"layers\.{layers}\.(self_attn|mlp)\..*_proj\.weight$")
    _tensors(lambda tensors: {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if part.search(n)})(folder)


def _other_template(folder: Path) -> None:
    turns = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(turns)


def _renumbered(folder: Path) -> None:
    """Exchange the numbers of the first two special tokens of the tokenizer."""

    def change(file: dict[str, Any]) -> None:
        first, second = file["added_tokens"][:2]
        first["id"], second["id"] = second["id"], first["id"]
        vocabulary = file["model"]["vocab"]
        for token in (first, second):
            if token["content"] in vocabulary:
                vocabulary[token["content"]] = token["id"]

    _edited(folder, "tokenizer.json", change)


def _wrong_end(folder: Path) -> None:
    generation = "generation_config.json"
    name = generation if (folder / generation).is_file() else "config.json"  # which vLLM falls back to
    _edited(folder, name, lambda config: config.update(eos_token_id=7))


TRANSPOSED, ROUNDED = "a shard of TP 2 transposed", "activations rounded otherwise than the target does"
"""Faults that no file has: of the serving, and of the measurement."""
_STATIC_SCALES = rf"layers\.{LAYER}\..*\.input_scale$"
FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("wrong RoPE base", FP8_CACHE, "other configuration", _rope(rope_theta=500000.0)),
        Fault("wrong RoPE scaling", FP8_CACHE, "other configuration", _rope(rope_type="linear", factor=4.0)),
        Fault("KV scales times 2", FP8_CACHE, "wrong scale", _scaled(r"\.[kv]_scale$", 2.0)),
        Fault(
            "one layer's KV scales times 8", FP8_CACHE, "wrong scale",
            _scaled(rf"layers\.{LAYER}\..*\.[kv]_scale$", 8.0),
        ),
        Fault("one dead expert", MIXTURE, "bad scale", _tensors(_dead_expert)),
        Fault(
            "one layer's gate and up swapped", FP8_CACHE, "error too large",
            _tensors(_swapped(f"layers.{LAYER}.mlp.gate_proj", f"layers.{LAYER}.mlp.up_proj")),
        ),
        Fault(TRANSPOSED, FP8_CACHE, None),
        Fault("the chat template of another model", FP8_CACHE, "other template", _other_template),
        Fault("a wrong end-of-text token", FP8_CACHE, "other configuration", _wrong_end),
        Fault("a predictor without scales", PREDICTOR, "undeclared", _predictor_without_scales),
        Fault(
            "one layer's static activation scales divided by 4", STATIC, "wrong scale", _scaled(_STATIC_SCALES, 0.25),
        ),
        Fault(
            "weights of two layers exchanged", FP8_CACHE, "error too large",
            _tensors(_swapped(".layers.1.", ".layers.2.")),
        ),
        Fault("the tokenizer's special tokens renumbered", FP8_CACHE, "other tokenizer", _renumbered),
        Fault(ROUNDED, SOUND[7], None),
    )
}  # fmt: skip
"""Twelve faults by name, two of them in two kinds."""
