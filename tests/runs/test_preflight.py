"""What a run is refused for before it starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.runs import preflight
from quantmint.pipeline.stages import evaluate, quantize

Quantmint = Callable[..., Any]


@pytest.mark.parametrize("until", [None, "serve-candidate", "gate", "publish"])
def test_no_vllm_is_told_before_any_work(quantmint: Quantmint, project: Path, until: str | None) -> None:
    ended = quantmint("run", "r.yaml", *(["--until", until] if until else []))
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("quantmint: no vLLM was found to serve with, which this recipe needs.\n")
    for words in ("make serving", "QUANTMINT_VLLM", "--until inspect"):
        assert words in ended.err
    assert list((project / "store").rglob("record.json")) == []
    assert not (project / "store" / "runs").exists()


def test_until_inspect_works_without_vllm(quantmint: Quantmint, project: Path, models: Callable[..., Path]) -> None:
    """The real stages, on a small model."""
    recipe = project / "r.yaml"
    recipe.write_text(
        recipe.read_text()
        .replace("folder: model}", f"folder: {models('llama')}}}")
        .replace("samples: 4, sequence_length: 64", "samples: 2, sequence_length: 16")
    )
    (project / "words.jsonl").write_text(('{"text": "' + "w7 w8 w9 " * 8 + '"}\n') * 8)
    ended = quantmint("run", "r.yaml", "--until", "inspect", "--device", "cpu", "--json")
    assert ended.code == 0, ended.err
    assert [stage["stage"] for stage in ended.json["stages"]] == ["source", "calibrate", "quantize", "inspect"]
    assert ended.json["verdict"] is None
    again = quantmint("run", "r.yaml", "--until", "inspect", "--json")
    assert [stage["cached"] for stage in again.json["stages"]] == [True] * 4
    checkpoint = Path(ended.json["stages"][2]["path"]) / "checkpoint"
    assert quantmint("inspect", checkpoint, "--source", models("llama")).code == 0


def test_a_vllm_that_is_named_wrongly_is_an_error_at_once(
    quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantmint.pipeline.serving.environment import find_vllm

    monkeypatch.setattr("quantmint.pipeline.runs.session.find_vllm", find_vllm)
    for arguments in (["--vllm", "/nowhere/vllm"], []):
        monkeypatch.setenv("QUANTMINT_VLLM", "/nowhere/vllm")
        ended = quantmint("run", "r.yaml", "--until", "source", *arguments)
        assert ended.code == 2
        assert "/nowhere/vllm" in ended.err


@pytest.mark.parametrize(
    ("package", "engine", "extra"),
    [
        ("lm_eval", "stream", "evaluate"),
        ("tenacity", "stream", "evaluate"),  # of lm-eval[api], which lm-eval alone does not bring
        ("aiohttp", "stream", "evaluate"),
        ("matplotlib", "stream", "report"),
        ("llmcompressor",) * 3,
    ],
)
def test_a_package_that_a_later_stage_needs_is_missed_before_the_first(
    package: str, engine: str, extra: str, quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = project / "r.yaml"
    recipe.write_text(recipe.read_text().replace("quantization: {", f"quantization: {{engine: {engine}, "))
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == package else object())
    ended = quantmint("run", "r.yaml")
    assert (ended.code, ended.err) == (
        2,
        f"quantmint: this needs {package}, which is not installed.\n  pip install 'quantmint[{extra}]'\n",
    )
    assert list((project / "store").rglob("record.json")) == []


@pytest.mark.parametrize("takes", ["GPTQ", "to learn the rounding of weights"])
def test_a_device_that_is_too_small_for_gptq_is_told_before_any_work(
    quantmint: Quantmint, project: Path, models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, takes: str
) -> None:
    monkeypatch.setattr(quantize, "device_memory", lambda _device: 100_000)
    if takes != "GPTQ":  # which takes more of so small a model
        monkeypatch.setattr(quantize, "require_rounding_room", lambda *_: True)
    recipe = project / "r.yaml"
    text = recipe.read_text().replace("folder: model}", f"folder: {models('llama')}}}")
    text = re.sub(r"quantization: .*", "quantization: {scheme: mxfp4, algorithm: tuned, tuned: {weights: true}}", text)
    (project / "words.txt").write_text("w5 w6 w7 w8\n" * 256)
    (project / "words.yaml").write_text("name: words\ndescription: Words.\nfile: words.txt\n")
    calibration = "calibration: {set: words.yaml, samples: 16, sequence_length: 64}"
    recipe.write_text(re.sub(r"calibration: .*", calibration, text))
    ended = quantmint("run", "r.yaml", "--until", "inspect", "--device", "cpu")
    assert ended.code == 2
    assert f"quantization.algorithm: {takes} takes" in ended.err
    assert not list((project / "store").glob("calibrate/*"))


def test_a_package_of_a_task_is_missed_before_the_first_stage(
    quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # IFEval's row, for a task of the suite that this small model can be asked.
    monkeypatch.setattr(evaluate, "_TASK_MODULES", {"tiny_facts": evaluate._TASK_MODULES["ifeval"]})
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "langdetect" else object())
    ended = quantmint("run", "r.yaml")
    assert (ended.code, "this needs langdetect, which is not installed" in ended.err) == (2, True), ended.err


def test_a_package_that_vllm_would_import_is_missed_in_its_own_environment(
    quantmint: Quantmint, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantmint.pipeline.serving.environment import find_vllm

    monkeypatch.setattr("quantmint.pipeline.runs.session.find_vllm", find_vllm)
    bin_ = tmp_path / "serving" / "bin"
    bin_.mkdir(parents=True)
    # An interpreter without site-packages, beside ours, which may have everything.
    python = f'#!/bin/sh\ncase "$*" in *metadata*) echo 0.32.0;; *) exec {sys.executable} -S "$@";; esac\n'
    for name, text in (("python", python), ("vllm", "#!/bin/sh\nexit 1\n")):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("QUANTMINT_VLLM", str(bin_ / "vllm"))
    recipe = project / "r.yaml"
    recipe.write_text(recipe.read_text().replace("ptpc_fp8", "mxfp4_weight_only"))
    ended = quantmint("run", "r.yaml")
    assert ended.code == 2, ended.err
    assert "vLLM's environment lacks" in ended.err
    assert "amd-quark" in ended.err
    assert f"{bin_ / 'python'} -m pip install" in ended.err
    assert list((project / "store").rglob("record.json")) == []
