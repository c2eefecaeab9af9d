"""Drafts beside their target, by `quantmint run --until draft` on whole tiny models, and where launches name them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantmint.pipeline.base.errors import RecipeError, UserError
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.draft import draft_model
from quantmint.pipeline.stages.serve import launch_plan
from quantmint.pipeline.store.tree import Store
from tests.zoo.drafts import build_draft
from tests.zoo.models import read

TINY = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
RECIPE = """\
name: target
extends: tiny-ptpc
quantization: {{format: {layout}}}
draft: {{folder: draft, scheme: {scheme}}}
serve: {{speculative: {{method: {method}, tokens: 2}}}}
target: {{hardware: {hardware}}}
"""
ELEMENTS = {"ptpc_fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8}


def recipe(folder: Path, method: str, scheme: str, layout: str = "compressed-tensors") -> Path:
    path = folder / "target.yaml"
    hardware = "mi355x" if scheme == "mxfp4" else "cpu"  # vLLM's CPU build cannot load it
    path.write_text(RECIPE.format(method=method, scheme=scheme, layout=layout, hardware=hardware), encoding="utf-8")
    return path


def run(folder: Path, path: Path, code: int = 0) -> str:
    words = [sys.executable, "-m", "quantmint", "run", str(path), "--until", "draft"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "scheme", "layout"),
    [
        ("eagle3", "ptpc_fp8", "compressed-tensors"),
        ("eagle3", "mxfp4", "quark"),
        ("dflash", "ptpc_fp8", "quark"),
        ("dflash", "mxfp4", "compressed-tensors"),
    ],
)
def test_a_draft_is_quantized_and_inspected_beside_its_target(
    tmp_path: Path, method: str, scheme: str, layout: str
) -> None:
    draft = build_draft(method, TINY, tmp_path / "draft")
    run(tmp_path, recipe(tmp_path, method, scheme, layout))
    (entry,) = (tmp_path / "store" / "draft").glob("*/record.json")
    before, after = read(draft), read(entry.parent / "checkpoint")
    key = "midlayer.mlp.down_proj" if method == "eagle3" else "layers.0.mlp.down_proj"
    for module in (key, "fc"):
        stored = after.get(f"{module}.weight_packed", after.get(f"{module}.weight"))
        assert stored is not None
        assert stored.dtype == ELEMENTS[scheme]
        assert f"{module}.weight_scale" in after
    copied = [name for name in before if "norm" in name or name in ("lm_head.weight", "d2t")]
    assert all(torch.equal(before[name], after[name]) for name in copied)
    declared = json.loads((entry.parent / "checkpoint" / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == layout
    assert declared["ignore" if layout == "compressed-tensors" else "exclude"] == (
        ["lm_head"] if method == "eagle3" else []
    )
    inspection = json.loads((entry.parent / "inspection.json").read_text())
    assert (inspection["verdict"], inspection["quantized_modules"]) == ("PASS", 8)


def test_launches_name_the_draft_of_their_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = build_draft("eagle3", TINY, tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    setting = open_setting(str(recipe(tmp_path, "eagle3", "ptpc_fp8")), store=Store(tmp_path / "store"))
    planned = {stage.key: stage for stage in build_plan(setting)}
    quantized = draft_model(setting, "candidate")
    assert quantized.parent.name == planned["draft"].fingerprint
    assert planned["serve-candidate"].inputs["draft"] == "draft"
    for side, folder in (("baseline", draft), ("candidate", quantized)):
        served = launch_plan(setting, side, tmp_path / "model").option("--speculative-config")
        assert json.loads(str(served)) == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
        recorded = launch_plan(setting, side, Path("MODEL")).option("--speculative-config")
        assert json.loads(str(recorded))["model"] == "DRAFT"  # no path of this machine, and the same on both sides


def test_another_draft_changes_what_is_served_with_it_and_nothing_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "eagle3", "ptpc_fp8")
    prints = []
    for kind in ("eagle3", "dflash"):
        build_draft(kind, TINY, tmp_path / "draft")
        plan = build_plan(open_setting(str(path), store=Store(tmp_path / "store")))
        prints.append({stage.key: stage.fingerprint for stage in plan})
    same = {key for key in prints[0] if prints[0][key] == prints[1][key]}
    assert {"source", "quantize", "inspect"} <= same
    assert {"draft", "serve-baseline", "serve-candidate", "acceptance-candidate", "package"}.isdisjoint(same)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("draft: {folder: draft, scheme: ptpc_fp8}\n", "draft: found a draft, expected it with `serve.speculative`"),
        (
            "draft: {folder: draft, scheme: ptpc_fp8}\nserve: {speculative: {method: eagle3, model: other}}\n",
            "serve: found a model, expected none in `speculative`: `draft` is the model",
        ),
        (
            "draft: {folder: draft, scheme: fp8}\nserve: {speculative: {method: eagle3}}\n",
            "draft.scheme: found fp8, expected a scheme without static scales",
        ),
    ],
)
def test_a_draft_that_cannot_be_served_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"name: r\nsource: {{repo: org/model}}\nquantization: {{scheme: ptpc_fp8}}\n{text}")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert said in str(error.value)


@pytest.mark.slow
def test_a_folder_without_a_draft_and_a_width_that_does_not_fit_are_said(tmp_path: Path) -> None:
    path = recipe(tmp_path, "eagle3", "mxfp4")
    path.write_text(path.read_text().replace("mi355x", "cpu"))
    assert "draft.scheme: found mxfp4, which cpu cannot serve" in run(tmp_path, path, code=2)
    path = recipe(tmp_path, "eagle3", "mxfp4")
    assert "draft.folder: found no config.json in" in run(tmp_path, path, code=2)
    draft = build_draft("eagle3", TINY, tmp_path / "draft")
    from tests.zoo.models import write

    tensors = read(draft)
    write(draft, {**tensors, "fc.weight": tensors["fc.weight"][:, :750]})
    said = run(tmp_path, path, code=2)
    assert "found mxfp4 for fc, which has 750 inputs, expected a multiple of 32" in said


def test_what_is_no_draft_is_refused(tmp_path: Path) -> None:
    from quantmint.pipeline.quantize.model.draft import read_draft

    draft = build_draft("eagle3", TINY, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(
        json.dumps({**config, "architectures": ["NobodysDraft"], "model_type": "nobody"})
    )
    with pytest.raises(UserError, match="cannot build this model"):
        read_draft(draft)
