"""What lies beside the weights must say what the source says: configuration, template, tokenizer, end of text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.inspection.companions import check_companions

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def pair(models: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A source, and a copy of it that may be broken."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    for folder in (source, copy):
        shutil.copytree(models("llama"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return source, copy


def edit(path: Path, change: Change) -> None:
    data = json.loads(path.read_text()) if path.is_file() else {}
    change(data)
    path.write_text(json.dumps(data))


def rules(pair: tuple[Path, Path]) -> list[tuple[str, str]]:
    source, copy = pair
    return [(finding.rule, finding.where) for finding in check_companions(copy, source)]


@pytest.mark.parametrize(
    ("name", "change", "rule", "where"),
    [
        ("config.json", lambda c: c["rope_parameters"].update(rope_theta=1e6), "other configuration", "rope_theta"),
        ("config.json", lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 8.0}), "other configuration",
         "rope_parameters"),
        ("config.json", lambda c: c.update(eos_token_id=9), "other configuration", "eos_token_id"),
        ("config.json", lambda c: c.update(rms_norm_eps=1e-3), "other configuration", "rms_norm_eps"),
        ("config.json", lambda c: c.update(max_position_embeddings=7), "other configuration", "max_position"),
        ("generation_config.json", lambda c: c.update(eos_token_id=[2, 9]), "other configuration", "eos_token_id"),
        ("generation_config.json", lambda c: c.update(temperature=0.3), "other configuration", "temperature"),
        ("tokenizer_config.json", lambda c: c.update(eos_token="w9"), "other tokenizer", "eos_token"),
        ("tokenizer_config.json", lambda c: c.update(chat_template="{{ messages }}"), "other template", "template"),
        ("tokenizer.json", lambda c: c["model"]["vocab"].update(w5=6, w6=5), "other tokenizer", "tokenizer.json"),
        ("tokenizer.json", lambda c: c.update(pre_tokenizer=None), "other tokenizer", "tokenizer.json"),
    ],
    ids=["RoPE base", "RoPE scaling", "end", "norm", "positions", "ends", "temperature", "end's name", "template",
         "numbers", "words"],
)  # fmt: skip
def test_a_difference_is_named(pair: tuple[Path, Path], name: str, change: Change, rule: str, where: str) -> None:
    edit(pair[1] / name, change)
    assert any(rule == found and where in place for found, place in rules(pair)), rules(pair)


def test_what_a_library_changes_when_it_saves_again_is_no_difference(pair: tuple[Path, Path]) -> None:
    from transformers import AutoConfig, AutoTokenizer

    source, copy = pair
    edit(source / "config.json", lambda c: c.pop("attention_dropout", None))  # a default, which a release may leave out
    AutoConfig.from_pretrained(source).save_pretrained(copy)
    AutoTokenizer.from_pretrained(source).save_pretrained(copy)
    edit(copy / "config.json", lambda c: c.update(quantization_config={}, dtype="float16", transformers_version="9"))
    edit(copy / "tokenizer.json", lambda c: c.update(truncation={"max_length": 5}))
    assert rules(pair) == []


def test_the_older_spelling_of_rope_is_the_same(pair: tuple[Path, Path]) -> None:
    source = pair[0]

    def older(config: dict[str, Any]) -> None:
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters["rope_theta"]

    edit(source / "config.json", older)
    assert rules(pair) == []
    edit(source / "config.json", lambda config: config.update(rope_theta=77.0))
    assert rules(pair) == [("other configuration", "config.json: rope_parameters.rope_theta")]


def test_a_missing_generation_config_and_one_that_was_added(pair: tuple[Path, Path]) -> None:
    source, copy = pair
    (source / "generation_config.json").unlink(missing_ok=True)
    edit(copy / "generation_config.json", lambda c: (c.clear(), c.update(eos_token_id=2, temperature=0.6)))
    assert rules(pair) == []
    edit(copy / "generation_config.json", lambda c: c.update(eos_token_id=3))
    assert rules(pair) == [("other configuration", "generation_config.json: eos_token_id")]
    shutil.copyfile(copy / "generation_config.json", source / "generation_config.json")
    (copy / "generation_config.json").unlink()
    assert rules(pair) == [("other configuration", "generation_config.json")]


def test_merges_are_the_same_in_either_spelling(pair: tuple[Path, Path]) -> None:
    for folder, merges in zip(pair, (["w4 w5"], [["w4", "w5"]]), strict=True):
        edit(folder / "tokenizer.json", lambda c, merges=merges: c["model"].update(merges=merges))
    assert rules(pair) == []
