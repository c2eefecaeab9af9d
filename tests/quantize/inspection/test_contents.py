"""What a report shows of real checkpoints: every byte in one part, every layer in one row, every scale in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import Reader, open_checkpoint
from quantmint.pipeline.quantize.inspection.inspect import (
    Expectations,
    inspect_checkpoint,
    kv_scales,
    layer_errors,
    short_names,
    sizes,
)

Quantize = Callable[..., Any]


@pytest.mark.parametrize("layout", ["compressed-tensors", "quark"])
def test_every_byte_is_in_one_part(quantize: Quantize, layout: str) -> None:
    made = quantize("llama", layout)
    found = sizes(made.source, made.checkpoint)
    parts = {part["name"]: part for part in found["parts"]}
    assert sum(part["baseline_bytes"] for part in found["parts"]) == found["baseline_bytes"] == made.source.nbytes
    assert sum(part["candidate_bytes"] for part in found["parts"]) == found["candidate_bytes"] == made.checkpoint.nbytes
    linear = parts["linear weights"]
    assert 2 * linear["candidate_bytes"] == linear["baseline_bytes"] > 0
    assert parts["scales"]["baseline_bytes"] == 0 < parts["scales"]["candidate_bytes"]
    for name in ("embeddings and head", "norms and biases"):
        assert parts[name]["baseline_bytes"] == parts[name]["candidate_bytes"] > 0


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_every_layer_has_each_of_its_modules_once(quantize: Quantize, name: str) -> None:
    made = quantize(name, "compressed-tensors")
    inspection = inspect_checkpoint(made.checkpoint, made.structure, source=made.source).to_json()
    errors = layer_errors(inspection["layers"])
    assert sum(error["modules"] for error in errors) == len(inspection["layers"])
    places = [(error["layer"], error["kind"]) for error in errors]
    assert len(set(places)) == len(places)
    kinds = {kind for _, kind in places}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= kinds
    assert list(dict.fromkeys(kind for _, kind in places))[:4] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert min(error["sqnr_db"] for error in errors) == min(layer["sqnr_db"] for layer in inspection["layers"])
    if name == "qwen3-moe":
        experts = [error for error in errors if "experts" in error["kind"] or error["modules"] > 1]
        assert experts
        assert all(error["modules"] > 1 for error in experts)


@pytest.mark.parametrize("proven", [False, True])
def test_wide_rows_are_looked_at_in_the_memory_of_a_piece(
    quantize: Quantize, monkeypatch: pytest.MonkeyPatch, proven: bool
) -> None:
    made = quantize("llama", "compressed-tensors")
    piece = 4 * max(info.shape[-1] for _, info in made.source.tensors.values())
    read: list[int] = []

    class Small(Reader):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.piece = piece

        def rows(self, name: str, first: int, last: int) -> Any:
            found = super().rows(name, first, last)
            read.append(found.numel() if name.endswith(".weight") else 0)
            return found

    monkeypatch.setattr("quantmint.pipeline.quantize.inspection.inspect.Reader", Small)
    known = dict.fromkeys(made.structure.linear, 31.0) if proven else None
    assert inspect_checkpoint(
        made.checkpoint, made.structure, source=made.source, expected=Expectations(sqnr_db=known)
    ).passed
    assert 0 < max(read) <= piece


def test_names_are_as_short_as_they_can_be() -> None:
    paths = ["model.layers.mlp.down_proj", "model.layers.mlp.experts.down_proj", "model.layers.self_attn.q_proj",
             "visual.blocks.attn.qkv", "lm_head"]  # fmt: skip
    assert list(short_names(paths).values()) == ["mlp.down_proj", "experts.down_proj", "q_proj", "qkv", "lm_head"]
    assert short_names(["a.x", "b.a.x"]) == {"a.x": "a.x", "b.a.x": "b.a.x"}


@pytest.mark.parametrize("layout", ["compressed-tensors", "quark"])
def test_scales_of_k_and_v_by_layer(quantize: Quantize, layout: str) -> None:
    made = quantize("llama", layout)
    inspection = inspect_checkpoint(made.checkpoint, made.structure, source=made.source)
    found = kv_scales(made.checkpoint, inspection.kv_scales)
    layers = json.loads((made.folder / "config.json").read_text())["num_hidden_layers"]
    assert [(scale["which"], scale["layer"]) for scale in found] == [(w, n) for w in "KV" for n in range(layers)]
    assert sorted(scale["low"] for scale in found) == sorted(inspection.kv_scales.values())
    assert all(scale["low"] == scale["high"] for scale in found)


def test_scales_by_head_span_their_heads(quantize: Quantize, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    made = quantize("llama", "compressed-tensors")
    folder = tmp_path / "by head"
    shutil.copytree(made.folder, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.v_scale"
    tensors[name] = torch.tensor([0.5, 0.125], dtype=torch.bfloat16).reshape(2, 1, 1)
    save_file(tensors, path, metadata={"format": "pt"})
    single = {k: 0.25 for k in tensors if k.endswith(("k_scale", "v_scale")) and k != name}
    found = {(s["which"], s["layer"]): (s["low"], s["high"]) for s in kv_scales(open_checkpoint(folder), single)}
    assert found[("V", 1)] == (0.125, 0.5)
    assert found[("K", 1)] == (0.25, 0.25)
