"""Every known way for a library to leave something else than it was asked for, each named.

The libraries' output is played by what our own engine makes, which equals theirs, and is broken on purpose.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.pipeline.quantize.engines.libraries.result import adopt, differences, names_on_disk
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint

MODULE = "model.layers.0.mlp.down_proj"
ATTENTION = "model.layers.1.self_attn"
FORMATS = ("compressed-tensors", "quark")


class Output:
    """A folder as a library would leave it: change ``tensors`` and ``config``, then ask what is wrong."""

    def __init__(self, made: Any, folder: Path, checkpoint_format: str) -> None:
        self.made, self.folder, self.format = made, folder, checkpoint_format
        shutil.copytree(made.folder, folder)
        self.tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    @property
    def declared(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def adopted(self, destination: Path) -> Path:
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        (self.folder / "config.json").write_text(json.dumps(self.config))
        source, structure = self.made.source, self.made.structure
        names = names_on_disk(source, structure)
        adopt(self.folder, destination, names, source, self.made.choice, self.format)
        return destination

    def wrong(self, destination: Path, *, algorithm: str = "none") -> list[str]:
        found: Iterator[str] = differences(
            open_checkpoint(self.adopted(destination)),
            self.made.source,
            self.made.structure,
            self.made.choice,
            checkpoint_format=self.format,
            algorithm_name=algorithm,
        )
        return list(found)


@pytest.fixture
def output(quantize: Callable[..., Any], tmp_path: Path) -> Callable[..., Output]:
    def make(checkpoint_format: str, *, model: str = "llama", **wanted: Any) -> Output:
        return Output(quantize(model, checkpoint_format, **wanted), tmp_path / "made", checkpoint_format)

    return make


@pytest.mark.parametrize("model", ["llama", "qwen3", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_what_was_asked_for_is_found_right(
    output: Callable[..., Output], tmp_path: Path, checkpoint_format: str, model: str
) -> None:
    assert output(checkpoint_format, model=model).wrong(tmp_path / "adopted") == []


def test_names_of_the_model_become_those_of_the_source(output: Callable[..., Output], tmp_path: Path) -> None:
    """Quark and llm-compressor write Mixtral's experts as ``mlp.experts.0.gate_proj``, which no server loads."""
    library = output("compressed-tensors", model="mixtral")
    inside = library.made.structure.modules
    assert inside["model.layers.0.block_sparse_moe.experts.1.w3"] == "model.layers.0.mlp.experts.1.up_proj"
    names = {
        **inside,
        **{f"{name}.block_sparse_moe.gate": f"{name}.mlp.gate" for name in ("model.layers.0", "model.layers.1")},
    }
    original = dict(library.tensors)
    library.tensors = {
        f"{names.get(module, module)}.{role}": tensor
        for (module, _, role), tensor in ((name.rpartition("."), t) for name, t in original.items())
    }
    assert not any("block_sparse_moe" in name for name in library.tensors)
    library.declared["ignore"] = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    assert library.wrong(tmp_path / "adopted") == []
    written = load_file(tmp_path / "adopted" / "model.safetensors")
    assert set(written) == set(original)
    assert all(torch.equal(written[name].view(torch.uint8), original[name].view(torch.uint8)) for name in original)
    assert json.loads((tmp_path / "adopted" / "config.json").read_text()) == library.made.checkpoint.config


def test_several_files_keep_their_index(output: Callable[..., Output], tmp_path: Path) -> None:
    library = output("compressed-tensors", model="mixtral")
    names = sorted(library.tensors)
    shards = {f"model-{n}.safetensors": names[n::2] for n in range(2)}
    inside = {name: name.replace("block_sparse_moe.gate", "mlp.gate") for name in names}
    for shard, held in shards.items():
        save_file({inside[name]: library.tensors[name] for name in held}, library.folder / shard)
    (library.folder / "model.safetensors").unlink()
    weight_map = {inside[name]: shard for shard, held in shards.items() for name in held}
    (library.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    made = library.made
    on_disk = names_on_disk(made.source, made.structure)
    adopt(library.folder, tmp_path / "adopted", on_disk, made.source, made.choice, "compressed-tensors")
    adopted = open_checkpoint(tmp_path / "adopted")  # proves that index and files agree
    assert {name: shard for name, (shard, _) in adopted.tensors.items()} == {
        name: shard for shard, held in shards.items() for name in held
    }


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_scales_that_are_declared_but_missing(
    output: Callable[..., Output], tmp_path: Path, checkpoint_format: str
) -> None:
    library = output(checkpoint_format, scheme="fp8")
    for name in [name for name in library.tensors if name.endswith("input_scale")]:
        del library.tensors[name]
    wrong = library.wrong(tmp_path / "adopted")
    assert len(wrong) == 14
    assert all(line.startswith("missing scale: ") and ".input_scale: " in line for line in wrong)


def test_a_kv_cache_that_is_not_declared(output: Callable[..., Output], tmp_path: Path) -> None:
    library = output("compressed-tensors")
    library.declared["kv_cache_scheme"] = None
    assert "it declares no FP8 KV cache, asked for was one" in library.wrong(tmp_path / "adopted")


@pytest.mark.parametrize("wanted", ["gptq", "awq", "smoothquant", "rotation"])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_an_algorithm_that_is_not_recorded(
    output: Callable[..., Output], tmp_path: Path, checkpoint_format: str, wanted: str
) -> None:
    wrong = output(checkpoint_format).wrong(tmp_path / "adopted", algorithm=wanted)
    assert wrong == [f"it records no algorithm, asked for was {wanted}"]


def test_another_algorithm(output: Callable[..., Output], tmp_path: Path) -> None:
    library = output("compressed-tensors")
    recipe = (
        "default_stage:\n  default_modifiers:\n    AWQModifier: {device: !!python/object/apply:torch.device [cpu]}\n"
    )
    (library.folder / "recipe.yaml").write_text(recipe)
    assert library.wrong(tmp_path / "adopted", algorithm="gptq") == ["it records awq, asked for was gptq"]


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_modules_in_another_scheme(output: Callable[..., Output], tmp_path: Path, checkpoint_format: str) -> None:
    library = output(checkpoint_format, scheme="mxfp4", kv_cache=False)
    library.made.choice.schemes[MODULE] = "mxfp4_weight_only"  # type: ignore[index]
    try:
        wrong = library.wrong(tmp_path / "adopted")
    finally:
        library.made.choice.schemes[MODULE] = "mxfp4"  # type: ignore[index]
    assert wrong[0] == f"{MODULE} is declared as mxfp4, asked for was mxfp4_weight_only"


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_modules_that_were_left_in_16_bit(
    output: Callable[..., Output], tmp_path: Path, checkpoint_format: str
) -> None:
    """What Quark does to experts that transformers holds stacked: declared, and not quantized."""
    library = output(checkpoint_format, model="mixtral", kv_cache=False)
    source = load_file(library.made.source.folder / "model.safetensors")
    for name in [name for name in library.tensors if ".experts.0." in name]:
        if name.endswith(".weight"):
            library.tensors[name] = source[name]
        else:
            del library.tensors[name]
    wrong = library.wrong(tmp_path / "adopted")
    assert len([line for line in wrong if line.startswith("not quantized: ") and ".experts.0." in line]) == 6


def test_what_is_carried_over_is_missing(output: Callable[..., Output], tmp_path: Path) -> None:
    library = output("quark")
    del library.tensors["model.norm.weight"]
    assert library.wrong(tmp_path / "adopted") == [
        "missing: model.norm.weight: the source has it, the checkpoint does not"
    ]


def test_another_layout(output: Callable[..., Output], tmp_path: Path) -> None:
    library = output("quark")
    library.format = "compressed-tensors"
    assert library.wrong(tmp_path / "adopted") == ["it is in quark, asked for was compressed-tensors"]
