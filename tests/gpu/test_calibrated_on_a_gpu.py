"""Calibration on a GPU: weights that are brought there beside the forward are the file's, and the ranges are one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantmint.calibration import weights
from quantmint.calibration.activations import Activations
from quantmint.calibration.layers import run_layers
from quantmint.calibration.observers import Observation
from quantmint.calibration.ranges import ranges_of
from quantmint.calibration.replica import load_resident, replica
from tests.bench.model import SHAPES, write_model
from tests.measuring import observe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    write_model(folder, SHAPES["2gb"], 6, 3)
    return folder


def test_weights_are_those_of_the_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE", 1_000_003)
    here, there = load_resident(model, "cpu"), load_resident(model, "cuda:0")
    for name in here.body:
        found = there.model.get_parameter(name)
        assert found.device == torch.device("cuda:0")
        assert torch.equal(found.cpu(), here.model.get_parameter(name)), name


def test_layers_find_what_the_whole_model_finds(model: Path, tmp_path: Path) -> None:
    batches = list(torch.randint(0, 32_000, (24, 256), generator=torch.Generator().manual_seed(0)).split(8))
    reference = observe(load_resident(model, "cuda:0"), batches)
    one = replica(model, "cuda:0")
    activations = Activations(tmp_path, 10**9, on_device=True)
    found = ranges_of(one, run_layers(one, batches, Observation(), activations).finish())
    for mine, theirs in (
        (found.inputs, reference.inputs),
        (found.keys, reference.keys),
        (found.values, reference.values),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(amax, theirs[name]) for name, amax in mine.items())
