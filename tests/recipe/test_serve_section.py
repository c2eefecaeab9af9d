"""The section `serve`: settings that replace a launch plan's, by the names in the table of knobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe
from quantmint.pipeline.stages.checks import check

HEAD = "name: r\nsource: {repo: org/model}\nquantization: {scheme: fp8_block}\n"


def load(text: str, folder: Path) -> LoadedRecipe:
    path = folder / "r.yaml"
    path.write_text(HEAD + text)
    return load_recipe(path)


def faults(text: str, folder: Path) -> str:
    with pytest.raises(RecipeError) as error:
        refuse(check(load(text, folder)))
    return str(error.value)


def test_the_section_that_a_sweep_prints_is_valid(tmp_path: Path) -> None:
    (tmp_path / "tuned.csv").write_text("Validator,PT_VERSION,2.9.0\n")
    serve = load(
        "serve:\n  profile: offline\n"
        "  knobs: {--max-num-seqs: 512, --enforce-eager: true, VLLM_ROCM_USE_AITER: false}\n"
        "  speculative: {method: eagle3, model: draft}\n  tunableop: tuned.csv\n  pack: 2\n",
        tmp_path,
    )
    assert not check(serve)
    section = serve.recipe.serve
    assert section.overrides == {"--max-num-seqs": "512", "--enforce-eager": True, "VLLM_ROCM_USE_AITER": False}
    assert section.speculative is not None
    assert (section.speculative.model, section.speculative.tokens) == ("draft", 2)
    assert serve.tunableop == tmp_path / "tuned.csv"
    assert (section.profile, section.pack) == ("offline", 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gate: {acceptance: {margin: 0.02}}\n", "gate: found a promise on acceptance, expected it with `serve.spec"),
        (
            "gate: {acceptance: {}}\nserve: {speculative: {method: ngram}}\nevaluation: {runtime: reference}\n",
            "gate: found a promise on acceptance, expected `runtime: vllm` for it",
        ),
    ],
)
def test_a_promise_on_acceptance_needs_speculative_decoding_by_vllm(tmp_path: Path, text: str, said: str) -> None:
    assert said in faults(text, tmp_path)


def test_a_misspelt_knob(tmp_path: Path) -> None:
    assert faults("serve:\n  knobs:\n    --max-num-sqs: 512\n", tmp_path) == (
        f"{tmp_path}/r.yaml:6:5: serve.knobs.--max-num-sqs: found no such knob, expected one of docs/serving-knobs.md "
        '(did you mean "--max-num-seqs"?)'
    )


def test_a_knob_of_the_machine(tmp_path: Path) -> None:
    message = faults("serve: {knobs: {numa_balancing: 1}}\n", tmp_path)
    assert "serve.knobs.numa_balancing: found a setting of the host" in message


def test_arguments_that_are_knobs_are_refused_where_they_stand(tmp_path: Path) -> None:
    found = faults("serve:\n  arguments: [--max-num-seqs, '4']\n", tmp_path)
    assert "r.yaml:5:" in found
    assert "serve.arguments: --max-num-seqs is a knob of the plan" in found
    passed = load("serve:\n  arguments: [--reasoning-parser, qwen3]\n", tmp_path)
    assert not check(passed)
    assert passed.recipe.serve.arguments == ("--reasoning-parser", "qwen3")
