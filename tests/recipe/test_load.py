"""Loading of recipes: names, paths, `extends`, and the published text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantmint.pipeline.base.errors import RecipeError, UserError
from quantmint.pipeline.recipe.faults import Position
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe

Write = Callable[..., Path]

BASE = """\
source: {repo: org/model, revision: main}
quantization:
  scheme: fp8
  exclude: [lm_head, a.b]
target: {gpus: 8, hardware: mi355x}
"""


def test_a_short_recipe_is_enough(load: Callable[[str], LoadedRecipe]) -> None:
    recipe = load("name: r\nsource: {repo: org/model}\nquantization: {scheme: ptpc_fp8}\n").recipe
    assert recipe.source.revision == "main"
    assert recipe.quantization.format == "compressed-tensors"
    assert recipe.quantization.engine == "stream"
    assert recipe.quantization.kv_cache == "auto"
    assert recipe.calibration is None
    assert recipe.gate.accuracy.margin == 0.01


def test_files_are_named_relative_to_the_file_that_names_them(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name stays a name; of a path the proof keeps the name alone, and of a suite where a release holds it."""
    write(BASE + "calibration: {set: mine.yaml}\nevaluation: {suite: sets/own.yaml}\n", "shared/base.yaml")
    path = write("name: top\nextends: shared/base.yaml\ntarget: {workload: w.yaml}\n", "top.yaml")
    monkeypatch.chdir(tmp_path.parent)
    loaded = load_recipe(path)
    folder = Path(path).absolute().parent
    assert loaded.recipe.calibration is not None
    assert loaded.recipe.calibration.set == str(folder / "shared" / "mine.yaml")
    assert loaded.recipe.evaluation.suite == str(folder / "shared" / "sets" / "own.yaml")
    assert loaded.recipe.target.workload == str(folder / "w.yaml")
    proven = yaml.safe_load(loaded.text_proven)
    assert [proven["calibration"]["set"], proven["target"]["workload"]] == ["mine.yaml", "w.yaml"]
    assert proven["evaluation"]["suite"] == "quantmint/suite/own.yaml"


def test_mappings_merge_and_other_values_replace(write: Write) -> None:
    write(BASE, "shared/base.yaml")
    path = write(
        "name: top\nextends: shared/base.yaml\n"
        "quantization: {exclude: [c], kv_cache: fp8}\ntarget:\n  gpus: 4\ncalibration: {set: tiny}\n",
        "top.yaml",
    )
    loaded = load_recipe(path)
    recipe = loaded.recipe
    assert recipe.quantization.scheme == "fp8"
    assert recipe.quantization.kv_cache == "fp8"
    assert recipe.quantization.exclude == ("c",)
    assert (recipe.target.gpus, recipe.target.hardware) == (4, "mi355x")
    assert loaded.place("quantization", "scheme") == Position("shared/base.yaml", 3, 11)
    assert loaded.place("quantization", "exclude", 0) == Position("top.yaml", 3, 26)
    assert loaded.place("target", "gpus") == Position("top.yaml", 5, 9)
    assert loaded.place("target", "hardware") == Position("shared/base.yaml", 5, 29)
    # The base's second item is gone with its list, and defaults are placed at the mapping that could hold them.
    assert ("quantization", "exclude", 1) not in loaded.positions.values
    assert loaded.place("target", "workload") == Position("top.yaml", 4, 1)
    assert loaded.place("evaluation", "suite") == Position("top.yaml", 1, 1)


def test_a_fault_names_the_file_that_has_it(write: Write) -> None:
    write("source: {repo: org/model}\nquantization: {scheme: fp7}\ntarget: {gpu: 1}\n", "base.yaml")
    path = write("name: r\nextends: base.yaml\ntarget: {gpus: none}\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe(path)
    assert str(refused.value).splitlines() == [
        'base.yaml:2:24: quantization.scheme: found "fp7", expected one of ptpc_fp8, fp8, fp8_block, mxfp4, '
        "mxfp4_weight_only, mxfp4_fp8, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, nvfp4_weight_only, "
        'int8_w8a8, w4a16, auto (did you mean "fp8"?)',
        "base.yaml:3:10: target.gpu: found an unknown key, expected one of aiter, gpus, hardware, max_model_len, "
        'mx_scales, workload (did you mean "gpus"?)',
        'r.yaml:3:16: target.gpus: found "none", expected a whole number of at least 1',
    ]


def test_circles_are_refused(write: Write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("extends: c.yaml\n", "b.yaml")
    write("\nextends: a.yaml\n", "c.yaml")
    with pytest.raises(RecipeError) as refused:
        load_recipe("a.yaml")
    assert str(refused.value) == (
        "c.yaml:2:10: extends: found a circle (a.yaml -> b.yaml -> c.yaml -> a.yaml), "
        "expected a file that does not lead back here"
    )
    write("extends: self.yaml\n", "self.yaml")
    with pytest.raises(RecipeError, match=r"self.yaml:1:10: extends: found a circle \(self.yaml -> self.yaml\)"):
        load_recipe("self.yaml")


@pytest.mark.parametrize(
    ("extends", "expected"),
    [
        (
            "bas.yaml",
            'r.yaml:2:10: extends: found no recipe file bas.yaml (did you mean "base.yaml"?), '
            "expected a path to one or a recipe's name",
        ),
        (
            "llama8b-fp8",
            'r.yaml:2:10: extends: found no recipe "llama8b-fp8" (did you mean "llama8b-fp8kv"?)',
        ),
        ("[a]", "r.yaml:2:10: extends: found a list, expected the path of a YAML file or a recipe's name"),
        ("", "r.yaml:2:9: extends: found null, expected the path of a YAML file or a recipe's name"),
    ],
)
def test_extends_of_a_missing_file(write: Write, extends: str, expected: str) -> None:
    write(BASE, "base.yaml")
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(f"name: r\nextends: {extends}\n"))
    assert str(refused.value) == expected


def test_a_folder_is_read_from_the_file_that_names_it(write: Write, tmp_path: Path) -> None:
    write("source: {folder: ../model}\nquantization: {scheme: fp8}\n", "shared/base.yaml")
    loaded = load_recipe(write("name: r\nextends: shared/base.yaml\n"))
    assert loaded.source_folder == tmp_path / "model"
    assert loaded.recipe.source.folder == "../model"
    assert load_recipe("llama8b-ptpc").source_folder is None


def test_unknown_names(write: Write) -> None:
    with pytest.raises(UserError) as refused:
        load_recipe("llama70b-fp8")
    assert refused.value.message == 'found no recipe "llama70b-fp8" (did you mean "llama70b-fp8kv"?)'
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("There are: deepseek-r1-mxfp4, ")
    with pytest.raises(UserError, match=r"^found no recipe file gone.yaml, expected a path to one"):
        load_recipe("gone.yaml")
    with pytest.raises(UserError, match='found no recipe "_base"'):
        load_recipe("_base")


def test_importing_recipes_is_cheap() -> None:
    heavy = "('torch', 'transformers', 'scipy')"
    code = f"import sys, quantmint.pipeline.recipe.load; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


KEYS = st.sampled_from(
    [
        *("name", "extends", "source", "repo", "folder", "quantization", "scheme", "exclude", "overrides", "modules"),
        *("gate", "accuracy", "margin", "baseline_score", "target", "gpus", "calibration", "set", "x"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=4) | st.just("fp8")
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, TREES, max_size=6).map(lambda tree: yaml.safe_dump(tree, allow_unicode=True)) | st.text())
def test_garbage_is_refused_never_crashed_on(write: Write, text: str) -> None:
    try:
        path = write(text)
    except UnicodeEncodeError:  # a lone surrogate cannot be written to a file at all
        return
    with pytest.raises(RecipeError):
        load_recipe(path)
