"""Input scales of experts and KV scales, by tensor and by head, are llm-compressor's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantmint.calibration.observers import Observation
from quantmint.calibration.replica import load_resident
from quantmint.pipeline.quantize.engines.stream.engine import scale_ranges
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.schemes.scales import fp8_scale
from tests.measuring import observe

pytestmark = pytest.mark.slow

# Model, every token, by head.
CASES = [
    ("mixtral", True, False),
    ("mixtral", False, False),
    ("qwen3-moe", True, True),
    ("qwen3-moe", False, False),
    ("qwen2-moe", True, False),
    ("deepseek-v3", True, False),
    ("deepseek-v3", False, False),
    ("llama4", True, False),
    ("gemma3-text", True, True),
    ("llama", True, True),
]
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def made(
    models: Callable[..., Path],
    blocks: torch.Tensor,
    warm_library: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, bool, bool], dict[str, torch.Tensor]]:
    python = warm_library("llmcompressor")
    root = tmp_path_factory.mktemp("experts")
    jobs = [
        {
            "source": str(models(model)),
            "out": str(root / f"{model}-{every_token}-{by_head}"),
            "ids": blocks.tolist(),
            "batch_size": 4,
            "every_token": every_token,
            "by_head": by_head,
        }
        for model, every_token, by_head in CASES
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    finished = subprocess.run(
        [python, "-m", "tests.quantize.oracles.experts_with_llmcompressor", root / "jobs.json"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]

    def get(model: str, every_token: bool, by_head: bool) -> dict[str, torch.Tensor]:
        folder = root / f"{model}-{every_token}-{by_head}"
        return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}

    return get


@pytest.mark.parametrize(("model", "every_token", "by_head"), CASES)
def test_static_scales_are_those_of_llmcompressor(
    models: Callable[..., Path],
    blocks: torch.Tensor,
    made: Callable[[str, bool, bool], dict[str, torch.Tensor]],
    model: str,
    every_token: bool,
    by_head: bool,
) -> None:
    observation = Observation(experts="all" if every_token else "routed", min_expert_tokens=1)
    ranges = observe(load_resident(models(model), "cpu"), blocks.split(4), observation)
    source = open_checkpoint(models(model))
    structure = read_structure(source.folder, source.tensors)
    theirs = {name: t for name, t in made(model, every_token, by_head).items() if name.endswith("_scale")}
    cached = any(name.endswith("k_scale") for name in theirs)
    # Every linear module of the model has its range, under its name on disk.
    choice = Choice(dict.fromkeys(structure.linear, "fp8"), structure.kept, cached, by_head)
    static = scale_ranges(ranges, choice, "compressed-tensors")
    assert {name for name in static if name.endswith("input_scale")} == {f"{m}.input_scale" for m in structure.linear}
    compared = 0
    for name, amax in static.items():
        # llm-compressor renames Mixtral's parts, and forgets the room that they are in.
        module, _, role = name.rpartition(".")
        prefix, _, part = module.rpartition(".")
        wanted = next(t for known, t in theirs.items() if known in (name, f"{prefix}.{_MIXTRAL.get(part)}.{role}"))
        assert wanted.flatten().tolist() == fp8_scale(amax.bfloat16()).tolist(), name
        if role != "input_scale":
            assert wanted.numel() == (2 if by_head else 1)
            assert not by_head or wanted.ndim == 3
        compared += 1
    assert compared == len(structure.linear) + 4 * cached
