"""What is refused of a recipe for SGLang: launchers, endpoints of the gate, servers of another kind or version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.commands.cli import main
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.recipe.serving import Serve
from tests.serving.served.cases import MODEL
from tests.serving.sglang_server import SglangServer

BASE: dict[str, Any] = {
    "name": "sg",
    "description": "The embedded model on SGLang.",
    "source": {"folder": str(MODEL)},
    "quantization": {"scheme": "ptpc_fp8", "kv_cache": "auto", "format": "compressed-tensors"},
    "target": {"hardware": "cpu", "gpus": 1, "workload": "tiny", "max_model_len": 512},
    "serve": {"runtime": "sglang"},
    "evaluation": {"suite": "tiny"},
    "gate": {"throughput": {"min_ratio": None}},
    "publish": {"folder": "published", "licence": {"id": "apache-2.0"}},
}


@pytest.fixture
def sglang() -> Iterator[SglangServer]:
    with SglangServer(None, None, MODEL) as server:
        yield server


def write(folder: Path, **sections: Any) -> Path:
    path = folder / "sg.yaml"
    path.write_text(yaml.safe_dump({**BASE, **sections}, sort_keys=False))
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, capsys.readouterr().err


def line_of(path: Path, key: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(key))


@pytest.mark.parametrize("command", [("run",), ("serve", "--dry-run"), ("serve", "--launcher", "docker")])
def test_another_launcher_is_refused_by_line_with_what_works(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    code, said = refused(capsys, command[0], path, *command[1:])
    assert code == 2
    assert f"{path.name}:{line_of(path, 'runtime')}:" in said
    assert "serve.runtime: found sglang with --launcher" in said
    assert "expected --launcher endpoint" in said
    assert "--endpoint baseline=http://HOST:PORT" in said
    assert not list((tmp_path / "store").glob("quantize/*"))  # before the work


@pytest.mark.parametrize(
    ("sections", "field", "found"),
    [
        ({"gate": {"throughput": {"min_ratio": 1.0}}}, "gate.throughput.min_ratio", "found 1"),
        ({"gate": {"throughput": {"min_ratio": None, "launches": 3}}}, "gate.throughput.launches", "found 3 launches"),
        ({"gate": {**BASE["gate"], "kl": {"max": 0.05}}}, "gate.kl", "found a promise on kl"),
        ({"evaluation": {**BASE["evaluation"], "long": "auto"}}, "evaluation.long", "found long"),
        ({"evaluation": {**BASE["evaluation"], "reasoning": "auto"}}, "evaluation.reasoning", "found reasoning"),
        ({"evaluation": {**BASE["evaluation"], "tools": "auto"}}, "evaluation.tools", "found tools"),
        ({"evaluation": {"suite": "tiny", "runtime": "reference"}}, "evaluation.runtime", "found reference"),
        ({"serve": {"runtime": "sglang", "knobs": {"--max-num-seqs": 8}}}, "serve.knobs.--max-num-seqs", "found --max"),
        ({"serve": {"runtime": "sglang", "pack": 2}}, "serve.pack", "found 2"),
        (
            {
                "serve": {"runtime": "sglang", "speculative": {"method": "ngram", "tokens": 2}},
                "gate": {**BASE["gate"], "acceptance": {"margin": 0.1}},
            },
            "gate.acceptance",
            "found a promise on acceptance",
        ),
    ],
)
def test_what_only_vllm_answers_is_refused_when_planned(
    sections: dict[str, Any],
    field: str,
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = refused(capsys, "plan", write(tmp_path, **sections))
    assert code == 2
    (line,) = [line for line in said.splitlines() if f"{field}: {found}" in line and "serve.runtime sglang" in line]
    assert "expected" in line


def asked(path: Path, baseline: str, candidate: str) -> tuple[object, ...]:
    sides = (f"--endpoint=baseline={baseline}", f"--endpoint=candidate={candidate}")
    return ("run", path, "--launcher", "endpoint", *sides)


def test_a_vllm_is_refused_by_name(
    sglang: SglangServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SglangServer(None, None, MODEL, owner="vllm") as vllm:
        code, said = refused(capsys, *asked(write(tmp_path), sglang.url, vllm.url))
        assert code != 0
        assert f"{vllm.url} is vLLM, expected SGLang" in said
        assert not list((tmp_path / "store").glob("quantize/*"))


def test_sglang_is_refused_where_vllm_is_promised(
    sglang: SglangServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = refused(capsys, "serve", MODEL, "--target", "cpu", "--launcher", "endpoint", "--endpoint", sglang.url)
    assert code != 0
    assert f"{sglang.url} is SGLang, expected vLLM" in said
    path = write(tmp_path, serve={})
    code, said = refused(capsys, *asked(path, sglang.url, sglang.url))
    assert code == 2
    assert "found a recipe that vllm answers for" in said


def test_two_versions_are_refused(
    sglang: SglangServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SglangServer(None, None, MODEL, version="0.5.8") as earlier:
        code, said = refused(capsys, *asked(write(tmp_path), sglang.url, earlier.url))
    assert code != 0
    assert "found SGLang 0.5.9 for the baseline, 0.5.8 for the candidate, expected one version" in said


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--launcher", "endpoint"], "expected --launcher endpoint together with --endpoint"),
        (["--endpoint", "baseline=http://a:1"], "expected --launcher endpoint together with --endpoint"),
        (["--launcher", "endpoint", "--endpoint", "http://a:1"], "found 'http://a:1', expected baseline=URL"),
        (["--launcher", "endpoint", "--endpoint", "baseline=http://a:1"], "found no --endpoint candidate=URL"),
        (["--launcher", "endpoint", "--endpoint", "baseline=a"], "is not the address of a server"),
    ],
)
def test_addresses_of_both_sides_are_expected(
    options: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = refused(capsys, "run", write(tmp_path), *options)
    assert code == 2
    assert complaint in said


def test_recipes_without_the_key_keep_their_fingerprints(tmp_path: Path) -> None:
    assert "runtime" not in Serve().model_dump(mode="json")
    assert "runtime" not in load_recipe("tiny-ptpc").recipe.model_dump(mode="json")["serve"]
    assert load_recipe(str(write(tmp_path))).recipe.model_dump(mode="json")["serve"]["runtime"] == "sglang"
