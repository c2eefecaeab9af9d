"""What calibration and quantization leave of a GPU's memory in our process, where a server is to start beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.quantize.device import give_back_memory
from quantmint.pipeline.runs.planner import build_plan, cut
from quantmint.pipeline.runs.runner import run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.store.tree import Store
from tests.bench.model import SHAPES, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
TOKENIZER = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
RECIPE = """\
name: calibrated
source: {folder: MODEL}
quantization: {scheme: fp8, kv_cache: fp8}
calibration: {set: tiny, samples: 8, sequence_length: 128, mode: resident}
target: {hardware: h100, workload: tiny, max_model_len: 512}
evaluation: {suite: tiny}
gate: {throughput: {min_ratio: null}}
"""


def test_nothing_is_kept_of_the_model_that_was_calibrated(tmp_path: Path) -> None:
    model, sizes = tmp_path / "model", SHAPES["2gb"]
    write_model(model, sizes, sizes.layers_for(sizes.gigabytes), 1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, model / name)
    recipe = tmp_path / "calibrated.yaml"
    recipe.write_text(RECIPE.replace("MODEL", str(model)))
    torch.cuda.reset_peak_memory_stats()
    setting = open_setting(str(recipe), store=Store(tmp_path / "store"))
    run_plan(cut(build_plan(setting), "quantize"), setting, PlainReporter())
    assert torch.cuda.max_memory_allocated() > 1.9e9, "the model was on the GPU"
    give_back_memory()
    assert torch.cuda.memory_reserved() < 0.1e9, "what is left are workspaces of the libraries"
