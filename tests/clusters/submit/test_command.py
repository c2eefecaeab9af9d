"""`quantmint submit` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantmint.pipeline.commands.cli import main


def ended(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["submit", *words])
    return int(end.value.code or 0)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("QUANTMINT_STORE", "QUANTMINT_IMAGE"):
        monkeypatch.delenv(name, raising=False)


def test_a_dry_run_prints_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("tiny-ptpc-fp8kv", "--slurm", "--time", "90m", "--dry-run", "--", "--until", "inspect") == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n")
    assert f"#SBATCH --chdir={tmp_path}\n" in text
    assert "#SBATCH --time=90\n" in text
    assert "run tiny-ptpc-fp8kv --json --store store --until inspect &\n" in text
    assert ended("tiny-ptpc-fp8kv", "--kubernetes", "--image", "quantmint:1", "--pvc", "shared", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("apiVersion: batch/v1\n")
    assert ended("tiny-ptpc-fp8kv", "--ray", "head:8265", "--dry-run") == 0
    assert json.loads(capsys.readouterr().out)["metadata"] == {"quantmint": "tiny-ptpc-fp8kv"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny-ptpc-fp8kv",), "expected one place"),
        (("tiny-ptpc-fp8kv", "--slurm", "--ray", "head"), "expected one place"),
        (("--slurm",), "missing RECIPE"),
        (("tiny-ptpc-fp8kv", "--slurm", "--pvc", "x"), "--pvc is for kubernetes, not for slurm"),
        (("tiny-ptpc-fp8kv", "--ray", "x", "--mount", "/a"), "--mount is for slurm, not for ray"),
        (("tiny-ptpc-fp8kv", "--slurm", "--attached"), "--attached is for ray, not for slurm"),
        (("tiny-ptpc-fp8kv", "--kubernetes", "--dry-run"), "--image is missing"),
        (("tiny-ptpc-fp8kv", "--ray", "ray://head:10001", "--dry-run"), "jobs go to the dashboard"),
        (("tiny-ptpc-fp8k", "--slurm", "--dry-run"), 'did you mean "tiny-ptpc-fp8kv"?'),
        (("tiny-ptpc-fp8kv", "--slurm", "--dry-run", "--", "--untill", "x"), "No such option"),
        (("tiny-ptpc-fp8kv", "--slurm", "--time", "soon", "--dry-run"), "expected one like 90m"),
        (("tiny-ptpc-fp8kv", "--ray", "x", "--time", "1h", "--dry-run"), "no time limit"),
        (("tiny-ptpc-fp8kv", "--ray", "x", "--env", "HF_TOKEN=x", "--dry-run"), "looks like the name of a secret"),
        (("--slurm", "--status", "one"), "the number that sbatch gave it"),
        (("--ray", "head", "--status", ""), "the identifier that Ray gave it"),
        (("tiny-ptpc-fp8kv", "--slurm", "--sbatch", "a b=c", "--dry-run"), "expected NAME=VALUE or NAME"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*words) == 2
    assert message in capsys.readouterr().err


def test_without_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert ended("tiny-ptpc-fp8kv", "--slurm") == 2
    assert "found no sbatch on PATH" in capsys.readouterr().err


def test_a_folder_of_logs_that_cannot_be_written_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "store").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("QUANTMINT_STORE", str(tmp_path / "store/below"))
    assert ended("tiny-ptpc-fp8kv", "--slurm") == 5
    assert "unexpected" not in capsys.readouterr().err


def test_without_a_cluster_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert ended("--kubernetes", "--status", "job") == 2
    assert "found no usable kubeconfig" in capsys.readouterr().err
