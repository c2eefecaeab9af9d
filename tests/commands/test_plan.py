"""`quantmint plan`: its text, its cautions, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Quantmint = Callable[..., Any]


@pytest.mark.usefixtures("_no_network", "large_disk")
def test_what_a_person_reads(quantmint: Quantmint, project: Path) -> None:
    ended = quantmint("plan", "r.yaml")
    assert ended.code == 0
    assert ended.err == ""
    for words in (
        "quantize",
        "to do",
        "source",
        "weights on each device",
        "tiny_facts",
        "disk: free",
        "times on",
    ):
        assert words in ended.out
    assert "\x1b" not in ended.out


@pytest.mark.usefixtures("large_disk")
def test_an_algorithm_that_harms_a_scheme_is_a_caution(quantmint: Quantmint, project: Path) -> None:
    def cautions(scheme: str, more: str) -> str:
        (project / "other.yaml").write_text(
            "extends: r.yaml\nname: other\ncalibration: null\n"
            f"quantization: {{scheme: {scheme}, kv_cache: auto, engine: quark, format: quark{more}}}\n"
        )
        ended = quantmint("plan", "other.yaml", "--json")
        assert ended.code == 0, ended.err
        return " ".join(ended.json["cautions"])

    assert "rotation may harm mxfp4: SmolLM2-135M loses less by rounding" in cautions("mxfp4", ", algorithm: rotation")
    assert "may harm" not in cautions("mxfp4", "")
    assert "may harm" not in cautions("int8_w8a8", ", algorithm: rotation")
    mixed = ", algorithm: rotation, overrides: [{modules: ['re:.*down_proj'], scheme: mxfp4_weight_only}]"
    assert "rotation may harm mxfp4_weight_only" in cautions("int8_w8a8", mixed)


@pytest.mark.usefixtures("large_disk")
def test_learned_weights_are_planned_with_their_disk_and_a_caution(
    quantmint: Quantmint, project: Path, words: tuple[str, ...]
) -> None:
    (project / "other.yaml").write_text(
        "extends: r.yaml\nname: other\ncalibration: {set: words.yaml, samples: 8, sequence_length: 64}\n"
        "quantization: {scheme: mxfp4, kv_cache: auto, algorithm: tuned, tuned: {weights: true}}\n"
    )
    ended = quantmint("plan", "other.yaml", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["disk"]["needed"]["layers of GPTQ"] > ended.json["disk"]["needed"]["checkpoint"]
    assert "there are 8 samples" in " ".join(ended.json["cautions"])
    tuned = ("--algorithm", "tuned", "--parameter", "weights=true", "--scheme", "mxfp4", "--samples", "8", *words)
    shown = quantmint("quantize", "model", "out", *tuned, "--dry-run")
    assert shown.code == 0, shown.err
    assert "disk: layers of GPTQ" in shown.out
    assert "there are 8 samples" in " ".join(shown.out.split())


@pytest.mark.parametrize("command", ["plan", "run", "quantize"])
def test_texts_that_make_too_few_tokens_are_refused(
    quantmint: Quantmint, models: Callable[..., Path], command: str
) -> None:
    Path("words.txt").write_text("w5 w6 w7 w8\n" * 20)
    Path("words.yaml").write_text("name: words\ndescription: Words.\nfile: words.txt\n")
    Path("r.yaml").write_text(
        f"name: r\nsource: {{folder: {models('llama')}}}\nquantization: {{scheme: ptpc_fp8, kv_cache: fp8}}\n"
        "calibration: {set: words.yaml, samples: 4, sequence_length: 64}\n"
        "target: {max_model_len: 512, workload: tiny}\nevaluation: {suite: tiny}\ngate: {accuracy: {margin: 0.02}}\n"
    )
    if command == "quantize":
        scheme = ("--scheme", "ptpc_fp8", "--kv-cache", "fp8")
        texts = ("--calibration", "words.yaml", "--samples", "4", "--sequence-length", "64")
        ended = quantmint("quantize", models("llama"), "out", *scheme, *texts)
    else:
        ended = quantmint(command, "r.yaml", "--store", "store")
        assert "r.yaml:4:41: " in ended.err
    assert ended.code == 2
    assert "samples: the calibration texts make 100 tokens" in ended.err
    assert not Path("out").exists()
    assert not list(Path("store").glob("*/*"))


@pytest.mark.usefixtures("large_disk")
def test_brackets_are_text(quantmint: Quantmint, project: Path) -> None:
    recipe = project / "r.yaml"
    recipe.write_text(recipe.read_text().replace("A test.", "'Made [/by] hand [bold].'"))
    ended = quantmint("plan", "r.yaml")
    assert ended.code == 0
    assert "Made [/by] hand [bold]." in ended.out


@pytest.mark.usefixtures("large_disk")
def test_the_plan_says_what_is_cached(orchestra: Any, quantmint: Quantmint) -> None:
    stages = [orchestra.stage("a"), orchestra.stage("b", "a")]
    orchestra.run(stages[0])
    orchestra.plan(*stages)
    told = quantmint("plan", "r.yaml", "--json").json
    assert [(stage["stage"], stage["cached"]) for stage in told["stages"]] == [("a", True), ("b", False)]
    assert orchestra.ran == ["a"], "nothing is made"


def test_without_a_config_or_a_network(quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = quantmint("plan", "llama8b-ptpc")
    assert ended.code == 2
    assert "cannot be resolved to a commit" in ended.err
    assert "--config FOLDER" in ended.err
    assert "Traceback" not in ended.err


def test_a_config_that_is_none(quantmint: Quantmint, tmp_path: Path) -> None:
    ended = quantmint("plan", "llama8b-ptpc", "--config", tmp_path)
    assert (ended.code, "config.json: no such file" in ended.err) == (2, True)
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}')
    ended = quantmint("plan", "llama8b-ptpc", "--config", tmp_path)
    assert (ended.code, "found num_hidden_layers 0" in ended.err) == (2, True)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 64,
    }
    sizes |= {"max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none-such", **sizes}))
    ended = quantmint("plan", "llama8b-ptpc", "--config", tmp_path)
    assert (ended.code, "transformers cannot build this model" in ended.err) == (2, True)
