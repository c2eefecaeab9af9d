"""The shipped recipes, their schema, and the configurations that they are checked against."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from quantmint import recipes
from quantmint.pipeline.recipe.json_schema import schema, schema_text
from quantmint.pipeline.recipe.load import load_recipe, recipe_names
from quantmint.pipeline.recipe.yaml_positions import parse, read
from quantmint.pipeline.stages.checks import check

RECIPES = Path(recipes.__path__[0])
CONFIGS = Path(__file__).parents[1] / "assets" / "configs"

PARAMETERS = {
    "Llama-3.1-8B-Instruct": 8.030,
    "Llama-3.1-70B-Instruct": 70.554,
    "Llama-3.3-70B-Instruct": 70.554,
    "Llama-3.1-405B-Instruct": 405.853,
    "Mixtral-8x7B-Instruct-v0.1": 46.703,
    "Mixtral-8x22B-Instruct-v0.1": 140.630,
    "Qwen3-30B-A3B": 30.532,
    "Qwen3-235B-A22B": 235.094,
    "Qwen3-Coder-480B-A35B-Instruct": 480.155,
    "DeepSeek-R1-0528": 671.026,
}


def test_names_of_shipped_recipes() -> None:
    assert set(recipe_names()) >= {
        *("tiny-ptpc-fp8kv", "tiny-ptpc", "tiny-mxfp4-auto", "tiny-mxfp4-fp8"),
        *("llama8b-fp8kv", "llama70b-fp8kv", "llama405b-fp8kv", "mixtral8x7b-fp8kv", "mixtral8x22b-fp8kv"),
        *("llama8b-mxfp4-auto", "llama70b-mxfp4", "llama405b-mxfp4", "deepseek-r1-mxfp4"),
        *("llama8b-ptpc", "llama70b-ptpc", "qwen3moe-ptpc", "qwen3moe-mxfp4", "qwen3next-ptpc", "qwen3vl-ptpc"),
        *("llama4maverick-ptpc", "deepseekv32-mxfp4", "gptoss120b-mxfp4-fp8", "gptoss120b-ptpc"),
        *("qwen3coder480b-mxfp4", "deepseek-r1-mxfp4-mtp", "minimaxm25-mxfp4", "glm5-mxfp4", "qwen35-397b-mxfp4"),
        *("kimik2thinking-mxfp4", "kimik25-mxfp4", "deepseekv4flash-mxfp4"),
    }


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_sound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    loaded = load_recipe(name)
    folder = loaded.source_folder or CONFIGS / str(loaded.recipe.source.repo).rpartition("/")[2]
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert [str(fault) for fault in check(loaded, config=config)] == []
    assert loaded.recipe.description


def test_the_schema_is_current() -> None:
    assert (RECIPES / "recipe.schema.json").read_text(encoding="utf-8") == schema_text()


@pytest.fixture(scope="module")
def validator() -> Any:
    from jsonschema import Draft202012Validator  # takes two seconds, of everybody who collects tests

    return Draft202012Validator(schema())


def test_the_schema_is_a_schema(validator: Any) -> None:
    validator.check_schema(schema())
    for section in (schema(), *schema()["$defs"].values()):
        assert section["description"]
        assert all(field.get("description") for field in section["properties"].values())


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_files_follow_the_schema(validator: Any, path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    validator.validate(read(path).data)


@pytest.mark.parametrize(
    "text",
    [
        "name: r\nsource: {repo: o/m}\nquantization: {scheme: fp7}",
        "name: r\nextends: a\nquantisation: {}",
        "name: r\nextends: a\ntarget: {gpus: 0}",
        "name: r\nextends: a\nquantization: {overrides: [{scheme: fp8}]}",
        "name: R\nextends: a",
    ],
)
def test_the_schema_refuses(validator: Any, text: str) -> None:
    assert not validator.is_valid(parse(text, "f").data)


@pytest.mark.slow
@pytest.mark.parametrize("model", PARAMETERS)
def test_configurations_have_the_published_size(model: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(CONFIGS / model)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert round(sum(tensor.numel() for tensor in built.parameters()) / 1e9, 3) == PARAMETERS[model]
