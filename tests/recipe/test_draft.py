"""`quantmint recipe init`: a recipe, a calibration set and a suite that are ready to be planned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import suites
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import table
from quantmint.pipeline.base.schemes import table as schemes
from quantmint.pipeline.recipe.draft import DraftOptions, default_scheme, draft, passages, split, write
from quantmint.pipeline.recipe.load import load_recipe, recipe_names
from tests.stages.conftest import quantmint

__all__ = ["quantmint"]

Quantmint = Callable[..., Any]


def prose(count: int) -> str:
    """So many paragraphs of 150 words."""
    return "\n\n".join(" ".join([f"paragraph{number}", *["word"] * 149]) for number in range(count))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "manual.md").write_text(prose(100))
    return tmp_path


def test_shipped_recipes_of_the_same_model_are_named(here: Path, quantmint: Quantmint) -> None:
    options = ("--target", "mi300x", "--scheme", "ptpc_fp8", "--name")
    ended = quantmint("recipe", "init", "somebody/llama-3.1-8B-instruct", *options, "mine")
    assert ended.code == 0, ended.err
    assert "shipped for this model: llama8b-fp8kv, llama8b-mxfp4-auto, llama8b-ptpc" in ended.err
    other = quantmint("recipe", "init", "somebody/other", *options, "other", "--json")
    assert other.json["shipped"] == []


def test_a_text_calibrates_or_is_judged(here: Path, quantmint: Quantmint) -> None:
    (here / "model" / "config.json").write_text('{"max_position_embeddings": 4096}')
    options = ("--text", "manual.md", "--target", "mi355x", "--publish", "my-org/mine", "--name", "mine")
    ended = quantmint("recipe", "init", "model", *options, "--json")
    assert (ended.code, ended.json["recipe"]) == (0, "mine")
    assert "mine" in recipe_names()
    loaded = load_recipe("mine")
    recipe = loaded.recipe
    assert (recipe.quantization.scheme, recipe.quantization.algorithm) == ("mxfp4", "gptq")
    assert (loaded.source_folder, recipe.publish.folder) == (here / "model", None)
    assert (recipe.target.max_model_len, recipe.target.workload) == (4096, "latency"), (
        "what the model has positions for"
    )
    assert recipe.publish.hub is not None
    assert recipe.calibration is not None
    assert recipe.publish.hub.repo == "my-org/mine"
    suite = suites.load(recipe.evaluation.suite)
    (task,) = suite.tasks
    assert task.margin is not None
    assert task.margin >= task.detectable(looks=4)
    read = {
        kind: [
            json.loads(line)["text"] for line in Path(f"recipes/mine-eval/mine-{kind}.jsonl").read_text().splitlines()
        ]
        for kind in ("prose", "texts")
    }
    assert (len(read["prose"]), len(read["texts"])) == (task.items, 75)
    assert sorted(read["prose"] + read["texts"]) == sorted(prose(100).split("\n\n")), "nothing is in both, or lost"
    before = {path: path.read_bytes() for path in Path("recipes").rglob("*.*")}
    again = quantmint("recipe", "init", "model", *options)
    assert (again.code, "is there already" in again.err) == (2, True)
    assert {path: path.read_bytes() for path in Path("recipes").rglob("*.*")} == before


@pytest.mark.parametrize("scheme", [*schemes(), "auto"])
@pytest.mark.parametrize("text", [True, False])
def test_each_scheme_is_a_recipe(here: Path, scheme: str, text: bool) -> None:
    for target in table():
        options = DraftOptions("org/model", target, target, scheme, here / "manual.md" if text else None)
        write(draft(options, Path("recipes")))
    assert default_scheme("mi355x") == "mxfp4"


@pytest.mark.parametrize("scheme", ["mxfp4", "auto", "fp8", "ptpc_fp8"])
def test_schemes_that_no_cpu_vllm_serves_use_the_reference_runtime(
    here: Path, quantmint: Quantmint, scheme: str
) -> None:
    options = ("--target", "cpu", "--scheme", scheme, "--text", "manual.md", "--name", "mine")
    ended = quantmint("recipe", "init", "model", *options)
    assert ended.code == 0, ended.err
    assert re.search(r"manual\.md: \d+ passages calibrate, \d+ are held out", ended.err)
    recipe = load_recipe("mine").recipe
    served = scheme == "ptpc_fp8"
    assert recipe.evaluation.runtime == ("vllm" if served else "reference")
    assert recipe.quantization.kv_cache == "auto", "an FP8 cache needs AVX-512 or AMX, and clips there"
    text = Path("recipes/mine.yaml").read_text()
    assert ("\n# vLLM's CPU build has no kernel for " in text) == (not served)
    suite = Path("recipes/mine-eval/mine-suite.yaml").read_text()
    assert "a small model may FAIL by its format alone" in suite.replace("\n  # ", " ")


def test_all_files_are_written_or_none(here: Path) -> None:
    with pytest.raises(UserError, match="expected a folder with a model"):
        draft(DraftOptions("no such model", "a", "mi300x", "ptpc_fp8"), Path("recipes"))
    broken = {**draft(DraftOptions("model", "a", "mi300x", "ptpc_fp8", here / "manual.md"), Path("recipes"))}
    broken[Path("recipes/a.yaml")] += "gate: nonsense\n"
    with pytest.raises(UserError, match="gate"):
        write(broken)
    assert not Path("recipes/a-eval").exists()
    assert not Path("recipes/a.yaml").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("few.txt", prose(39).encode(), "found 39 passages of 150 words"),
        ("same.txt", "\n\n".join([prose(1)] * 100).encode(), "found 1 passages"),
        ("latin.txt", "sch\xf6n".encode("latin-1"), "not UTF-8 at byte 3"),
        ("no.jsonl", b'{"words": "a"}\n', "is not JSON lines of passages, expected"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        passages(tmp_path / name)


def test_held_out_passages_are_spread_and_bounded() -> None:
    held, kept = split([str(number) for number in range(40_000)])
    assert (len(held), len(held) + len(kept), held[1]) == (800, 40_000, "50")


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "mxfp4"])
def test_a_drafted_recipe_of_a_mixture_can_be_planned(
    here: Path, quantmint: Quantmint, models: Callable[..., Path], scheme: str
) -> None:
    """vLLM for a CPU serves dense models in ptpc_fp8, and no routed experts."""
    options = ("--target", "cpu", "--scheme", scheme, "--text", "manual.md", "--name", "mine")
    ended = quantmint("recipe", "init", models("qwen3-moe"), *options)
    assert ended.code == 0, ended.err
    assert load_recipe("mine").recipe.evaluation.runtime == "reference"
    ended = quantmint("plan", "mine", "--store", "store")
    assert ended.code == 0, ended.err
