"""Modules that no text reaches: a recipe that needs their ranges is refused before any calibration text is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from tests.zoo.models import build

Quantmint = Callable[..., Any]
Zoo = Callable[[str], Path]

CALIBRATION = ("--calibration", "tiny", "--samples", "8", "--sequence-length", "32", "--batch-size", "4")
UNREACHED = {
    "mllama": "language_model.model.layers.1.cross_attn.k_proj",
    "ernie4_5_vl_moe": "model.layers.1.mlp.experts.4.down_proj",
}
"""First module that needs an image to be run, by model: in a layer for images, and one of the experts for images."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """``zoo("mllama")`` is the folder of a tiny model of `tests.zoo`; each is built once."""
    root = tmp_path_factory.mktemp("zoo")
    return lambda name: root / name if (root / name).is_dir() else build(name, root / name)


@pytest.fixture
def recipe(zoo: Zoo) -> Callable[..., Path]:
    """Write a recipe for a model of the zoo with a quantization section."""

    def write(name: str, quantization: str) -> Path:
        path = Path("r.yaml")
        path.write_text(
            f"name: r\nsource: {{folder: {zoo(name)}}}\nquantization: {{{quantization}}}\n"
            "calibration: {set: tiny, samples: 8, sequence_length: 32, batch_size: 4}\n"
            "target: {hardware: mi300x, max_model_len: 256, workload: tiny}\n"
            "evaluation: {suite: tiny}\ngate: {accuracy: {margin: 0.02}}\n"
        )
        return path

    return write


@pytest.mark.parametrize("scheme", ["fp8", "mxfp4_fp8"])
@pytest.mark.parametrize("name", UNREACHED)
def test_a_plan_refuses_static_scales(
    quantmint: Quantmint, recipe: Callable[..., Path], name: str, scheme: str
) -> None:
    ended = quantmint("plan", recipe(name, f"scheme: {scheme}, format: quark"))
    assert ended.code == 2
    assert (
        f"quantization.scheme: found {scheme} for {UNREACHED[name]}, which needs the range of its inputs" in ended.err
    )
    assert "calibration cannot measure it: the model does not run this module on text" in ended.err
    assert "Take a scheme without static scales, such as ptpc_fp8" in ended.err


def test_a_plan_refuses_an_override_with_static_scales(quantmint: Quantmint, recipe: Callable[..., Path]) -> None:
    module = UNREACHED["mllama"]
    path = recipe("mllama", "scheme: ptpc_fp8, overrides: [{scheme: fp8, modules: ['re:.*cross_attn.[kvq]_proj']}]")
    ended = quantmint("plan", path)
    assert ended.code == 2
    assert f"quantization.overrides: found fp8 for {module}" in ended.err


def test_a_plan_refuses_a_cache_whose_scales_cannot_be_measured(
    quantmint: Quantmint, recipe: Callable[..., Path]
) -> None:
    ended = quantmint("plan", recipe("mllama", "scheme: ptpc_fp8, kv_cache: fp8"))
    assert ended.code == 2
    assert "quantization.kv_cache: found fp8 for language_model.model.layers.1.cross_attn, which needs" in ended.err
    assert "calibration cannot measure them" in ended.err


@pytest.mark.parametrize("name", UNREACHED)
def test_a_plan_takes_scales_that_need_no_range(quantmint: Quantmint, recipe: Callable[..., Path], name: str) -> None:
    assert quantmint("plan", recipe(name, "scheme: ptpc_fp8")).code == 0


def test_attention_that_text_runs_through_may_cache_in_fp8(quantmint: Quantmint, recipe: Callable[..., Path]) -> None:
    assert quantmint("plan", recipe("ernie4_5_vl_moe", "scheme: ptpc_fp8, kv_cache: fp8")).code == 0


@pytest.mark.parametrize("name", UNREACHED)
def test_a_command_refuses_before_it_writes(quantmint: Quantmint, zoo: Zoo, name: str) -> None:
    ended = quantmint("quantize", zoo(name), "out", "--scheme", "fp8", *CALIBRATION)
    assert ended.code == 2
    assert f"found fp8 for {UNREACHED[name]}" in ended.err
    assert not Path("out").exists()


def test_experts_of_two_widths_are_read_back_in_four_bits(quantmint: Quantmint, zoo: Zoo) -> None:
    """ERNIE's for text and for images stand in one list; of packed weights only the scales tell how wide each is."""
    source = zoo("ernie4_5_vl_moe")
    assert quantmint("quantize", source, "out", "--scheme", "mxfp4").code == 0
    made, before = (read_structure(folder, open_checkpoint(folder).tensors).linear for folder in (Path("out"), source))
    widths = {shape for name, shape in before.items() if ".experts." in name and name.endswith("gate_proj")}
    assert len(widths) == 2
    assert made == before


def test_what_is_excluded_needs_no_range(quantmint: Quantmint, zoo: Zoo) -> None:
    kept = ("--exclude", r"re:.*\.layers\.1\.")
    ended = quantmint("quantize", zoo("mllama"), "out", "--scheme", "fp8", *kept, *CALIBRATION)
    assert ended.code == 0, ended.err
