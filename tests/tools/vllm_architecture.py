"""Build the class that a configuration names, and its drafter for multi-token prediction, and read both."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from vllm_reading import Reading, choose_renames, last, parent, pattern, read_modules, reason, stored_shapes, trace

if TYPE_CHECKING:
    from vllm_builder import Builder

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / "tests" / "zoo" / "releases.yaml"
_PREDICTED = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
# Where releases keep a layer for multi-token prediction.
_PLACES = ("model.layers.{0}", "mtp.layers.0", "model.mtp_layers.0", "mtp.0", "model.mtp_block.0", "model.mtp.layers.0")


def read(builder: Builder, folder: Path) -> Iterator[tuple[str, Reading]]:
    """Build the class that a folder's config.json names, and its drafter; yield the name of each with its facts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = config["architectures"][0]
    shapes = stored_shapes(folder)
    with tempfile.TemporaryDirectory() as scratch:
        settings = _with(config, _fields(architecture))
        _write(Path(scratch), settings)
        try:
            model, recorder = builder.build(builder.configure(Path(scratch)))
        except (TypeError, ValueError):  # some want to know the class of the language model, as releases say
            if (named := _name_part(settings)) is None:
                raise
            _write(Path(scratch), named)
            model, recorder = builder.build(builder.configure(Path(scratch)))
        reading, owners = read_modules(model, recorder)
        trace(model, owners, shapes, reading)
        choose_renames(model, recorder, reading, shapes)
        as_quark, _ = read_modules(*builder.build(builder.configure(Path(scratch)), "quark"))
        reading.unquantized |= as_quark.unquantized
        reading.quantized -= as_quark.unquantized
        drafter = None
        try:
            drafter = read_drafter(builder, Path(scratch), config, reading)
        except Exception as error:
            sys.stderr.write(f"    the drafter of {architecture} cannot be built: {reason(error)}\n")
    if drafter:
        reading.drafter = drafter[0]
        yield drafter
    yield architecture, reading


def read_drafter(
    builder: Builder, scratch: Path, config: Mapping[str, Any], target: Reading
) -> tuple[str, Reading] | None:
    """Build the class for multi-token prediction, and find by trial which names of modules on disk it loads.

    transformers leaves those layers out, so no checkpoint of the zoo has them.
    """
    predicted = {**_fields(config["architectures"][0]), **_PREDICTED}
    if "text_config" in config:
        predicted["text_config"] = {**predicted.get("text_config", {}), **_PREDICTED}
    _write(scratch, _with(config, predicted))
    drafter = builder.build_drafter(builder.configure(scratch), target.packed)
    if drafter is None:
        return None
    name, model, recorder = drafter
    reading, owners = read_modules(model, recorder)
    parts = {last(module): [last(part) for part in disk] for module, disk in target.modules_on_disk().items()}
    layers = (config.get("text_config") or config).get("num_hidden_layers", 0)
    most: dict[str, tuple[int, ...]] = {}
    for place in _PLACES:
        trial = replace(reading, loads={}, shards={})
        shapes = _likely_shapes(reading, {**parts, **reading.packed}, place.format(layers))
        trace(model, owners, shapes, trial)
        reached = {name: shape for name, shape in shapes.items() if trial.loads[pattern(name.removesuffix(".weight"))]}
        if len(reached) > len(most):
            most, reading.place = reached, place[: place.find("mtp") + 3] if "mtp" in place else "model"
    trace(model, owners, most, reading)
    choose_renames(model, recorder, reading, most)
    return name, reading


def _likely_shapes(reading: Reading, parts: Mapping[str, list[str]], layer: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors that the modules of a drafter may be loaded from, were their layer called ``layer``."""
    names: set[str] = set()
    above = layer.removesuffix(".0").removesuffix(".layers")
    for module in reading.quantized | reading.unquantized:
        tail = re.sub(r"^.*?layers\.\*\.(mtp_block\.)?", "", module) if ".layers.*." in module else last(module)
        ends = [f"{parent(tail)}.{part}".lstrip(".") for part in parts.get(last(tail), [last(tail)])]
        if module in reading.experts:
            ends = [f"{tail}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        for end in ends:
            names |= {f"{layer}.{end}.weight", f"{above}.{end}.weight"}
            if "mtp" in layer:
                names.add(f"{above}.{end}.0.weight")
    return dict.fromkeys(sorted(names), (8, 8))


def _name_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    text = config.get("text_config")
    if not text or text.get("architectures") or text.get("model_type") not in NAMES:
        return None
    return {**config, "text_config": {**text, "architectures": [NAMES[text["model_type"]]]}}


def _with(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with more fields, also in its parts."""
    result = dict(config)
    for key, value in fields.items():
        result[key] = _with(result.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if fields.get(key, 0) is not None}


@cache
def _fields(architecture: str) -> Mapping[str, Any]:
    """Return the fields of a class's releases that the zoo's config.json lacks."""
    return yaml.safe_load(RELEASES.read_text(encoding="utf-8")).get(architecture, {})


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
