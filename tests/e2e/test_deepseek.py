"""The shipped recipe of DeepSeek R1, on a tiny model of that architecture in FP8 blocks with its predictor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.project import Project
from tests.zoo.models import add_predictor, build, encode_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_RECIPES = Path(__file__).parents[2] / "recipes"
_CHANGES = """\
name: deepseek-r1-tiny
extends: deepseek-r1-mxfp4.yaml
source: {folder: model, repo: null, revision: null}
target: {hardware: cpu, gpus: 1, workload: tiny, max_model_len: 512}
evaluation: {suite: tiny-recall, runtime: reference, limit: 512}
gate:
  accuracy: {margin: 0.1}
  throughput: {min_ratio: null}
  canary: null
publish: {folder: published, licence: {id: mit}}
"""


def test_the_recipe_of_deepseek_r1_goes_through_to_a_gate(tmp_path: Path, warm_python: Path) -> None:
    build("deepseek_v3", tmp_path / "bf16")
    add_predictor(tmp_path / "bf16", "deepseek")
    encode_blocks(tmp_path / "bf16", tmp_path / "model")
    for recipe in ("deepseek-r1-mxfp4.yaml", "_base-mxfp4.yaml", "_base.yaml"):
        shutil.copyfile(_RECIPES / recipe, tmp_path / recipe)
    (tmp_path / "deepseek-r1-tiny.yaml").write_text(_CHANGES)
    project = Project(tmp_path, tmp_path / "no-vllm", warm_python)
    run = project.run("run", "deepseek-r1-tiny.yaml", "--until", "gate")
    assert run.returncode in (0, 1, 3, 4), run.stderr  # a verdict; of a model that only guesses, it is INVALID
    gates = list(project.store.glob("gate/*/gate.json"))
    assert len(gates) == 1, run.stderr
    assert json.loads(gates[0].read_text())["verdict"] in run.stdout
