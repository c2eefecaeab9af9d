"""vLLM's CPU build loads checkpoints of each kind of architecture, and computes what the reference runtime computes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import find_vllm
from tests.zoo.models import read, write
from tests.zoo.served import Folders, ServedOutcome, make, serve

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

MODELS = {
    "llama": ("ptpc_fp8", "ptpc_fp8_quark"),
    "phi3": ("ptpc_fp8",),  # q, k and v are one tensor on disk, and so are gate and up
    "qwen2_moe": ("ptpc_fp8",),  # a shared expert with a gate of its own, a dense layer before
    "llama4_text": ("ptpc_fp8_quark",),  # a stack of experts, taken apart
    "deepseek_v2": ("ptpc_fp8",),  # latent attention
    "falcon_h1": ("ptpc_fp8",),  # attention beside a state space
    "idefics3": ("ptpc_fp8",),  # a tower for images
}
MISREAD = "scales of k and o exchanged"


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of vLLM's environment."""
    try:
        vllm = find_vllm()
    except UserError as error:
        pytest.skip(error.message)
    if "cpu" not in vllm.version:
        pytest.skip(f"{vllm.executable} is vLLM {vllm.version}, not the CPU build")
    return vllm.python


@pytest.fixture(scope="module")
def outcomes(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ServedOutcome]:
    """Serve all checkpoints, and a misread one, by one process of vLLM."""
    workdir = tmp_path_factory.mktemp("served")
    folders: Folders = {}
    for name, columns in MODELS.items():
        made, refusals = make(name, columns, workdir)
        assert refusals == []
        folders |= made
    right = folders["llama", "ptpc_fp8"]
    folders["llama", MISREAD] = misread(right, workdir / "misread")
    served = serve(folders, python, references={("llama", MISREAD): right})
    return {(outcome.name, outcome.column): outcome for outcome in served}


def misread(folder: Path, out: Path) -> Path:
    """Copy a checkpoint into ``out`` with the scales of two modules of one layer exchanged; return ``out``."""
    shutil.copytree(folder, out)
    tensors = read(out)
    key, output = (f"model.layers.1.self_attn.{module}.weight_scale" for module in ("k_proj", "o_proj"))
    write(out, {**tensors, key: tensors[output], output: tensors[key]})
    return out


@pytest.mark.parametrize(("name", "column"), [(name, column) for name, columns in MODELS.items() for column in columns])
def test_vllm_loads_a_checkpoint_and_answers_as_the_reference(
    outcomes: dict[tuple[str, str], ServedOutcome], name: str, column: str
) -> None:
    assert outcomes[name, column].outcome == "agrees", outcomes[name, column]


def test_misread_scales_show(outcomes: dict[tuple[str, str], ServedOutcome]) -> None:
    outcome = outcomes["llama", MISREAD]
    assert outcome.outcome == "differs", outcome
    assert outcome.noise is not None
    assert outcome.distance is not None
    assert outcome.distance > 10 * outcome.noise
