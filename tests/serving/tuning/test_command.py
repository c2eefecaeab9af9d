"""quantmint tune: the real planner, the stand-in for vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.commands.cli import main
from tests.serving.conftest import write_tiny_llama
from tests.serving.tuning.sweeping import command_in, starts

Tune = Callable[..., int]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, and a vLLM that needs none."""
    write_tiny_llama(tmp_path / "model")
    (tmp_path / "model" / "surface.json").write_text(json.dumps({"throughput": {"--max-num-seqs": {"8": 1.5}}}))
    python = command_in(tmp_path).with_name("python")
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    monkeypatch.setenv("QUANTMINT_VLLM", str(tmp_path))
    monkeypatch.delenv("QUANTMINT_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tune(project: Path) -> Tune:
    def call(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["tune", *arguments])
        return int(ended.value.code or 0)

    return call


@pytest.mark.slow
def test_from_the_command_line_to_a_section_of_a_recipe(
    tune: Tune, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("model", "--target", "cpu", "--workload", "tiny", "--knob", "--max-num-seqs=8,32", "--budget", "10m")
    assert tune(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["serve"] == {"knobs": {"--max-num-seqs": 8}}
    assert found["target"] == "cpu:1"
    assert Path(found["page"]) == project / "tuning" / "model" / "tuning.html"
    count = len(starts(project))
    assert tune(*arguments) == 0  # everything is in the store
    assert len(starts(project)) == count
    said = capsys.readouterr().out
    assert "base plan" in said
    assert "serve:\n  knobs:\n    --max-num-seqs: 8\n" in said
    assert tune(*arguments, "--max-ttft", "1") == 1
    assert "No measured plan keeps" in capsys.readouterr().out
    assert all(entry["--kv-cache-dtype"] for entry in starts(project) if "--kv-cache-dtype" in entry)


def test_a_dry_run_starts_nothing_and_may_name_another_machine(
    tune: Tune, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = ("model", "--target", "mi300x:1", "--workload", "tiny", "--dry-run", "--tunableop")
    assert tune(*elsewhere) == 0
    said = capsys.readouterr().out
    assert "TunableOp" in said
    assert "max-num-batched-tokens 65536" in said
    assert tune(*elsewhere, "--json") == 0
    search, base, found, *_ = json.loads(capsys.readouterr().out)["trials"]
    where = {"PYTORCH_TUNABLEOP_FILENAME": str(project / "tuning/model/tunableop/tunableop_results%d.csv")}
    on = {"PYTORCH_TUNABLEOP_ENABLED": "1", **where}
    assert search["env"] == base["env"] | on | {"PYTORCH_TUNABLEOP_TUNING": "1"}
    assert found["env"] == base["env"] | on | {"PYTORCH_TUNABLEOP_TUNING": "0"}
    assert search["argv"] == base["argv"] == found["argv"]
    assert tune("model", "--target", "cpu", "--dry-run", "--json", "--knob", "--block-size=32") == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [trial["label"] for trial in trials] == ["base plan", "block-size 32", "base plan"]
    changed = trials[1]["argv"]
    assert changed[changed.index("--block-size") + 1] == "32"
    assert starts(project) == []
    assert not (project / "tuning").exists()


def test_what_is_tuned_is_what_is_served(tune: Tune, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("model", "--target", "mi300x:1", "--workload", "tiny")
    assert tune(*asked, "--dry-run", "--json") == 0
    base = json.loads(capsys.readouterr().out)["trials"][0]
    with pytest.raises(SystemExit):
        main(["serve", *asked, "--json", "--served-model-name", "model"])
    served = json.loads(capsys.readouterr().out)
    words = " ".join(base["argv"])
    for only in (" --no-enable-prefix-caching", " --generation-config vllm", " --disable-uvicorn-access-log"):
        assert only in words
        words = words.replace(only, "")
    assert words == " ".join(served["argv"])
    assert base["env"] == {**served["env"], "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}


def test_a_dry_run_needs_no_vllm(
    tune: Tune, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.serving.find_vllm", _absent)
    elsewhere = ("model", "--target", "mi300x:1", "--workload", "tiny")
    assert tune(*elsewhere, "--dry-run") == 0
    assert "launches of vLLM 0.33.0 on mi300x:1" in capsys.readouterr().out
    assert tune(*elsewhere, "--dry-run", "--vllm-version", "0.22.0") == 0
    assert "launches of vLLM 0.22.0 on mi300x:1" in capsys.readouterr().out
    assert tune(*elsewhere) == tune(*elsewhere, "--vllm-version", "0.22.0") == 2
    assert "no vLLM" in capsys.readouterr().err


def _absent(*_: Any) -> Any:
    raise UserError("no vLLM found")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "found 'nothing', expected a folder"),
        (("model", "--knob", "--max-num-seq=3"), 'did you mean "--max-num-seqs"?'),
        (("model", "--knob", "max_num_seqs=3"), 'did you mean "--max-num-seqs"?'),
        (("model", "--budget", "2"), "found the duration '2'"),
        (("model", "--target", "cpu", "--tunableop"), "nothing to tune"),
        (("model", "--target", "mi300x:8x2"), "a sweep starts its servers on this machine"),
        (("model", "--target", "mi300x:8"), "but this machine has"),
        (("model", "--workload", "tinny"), "did you mean 'tiny'?"),
        (("model", "--target", "mi300x:1", "--workload", "tiny", "--mode", "grid", "--dry-run"), "combinations"),
    ],
)
def test_what_is_wrong_is_said_in_one_message_and_nothing_starts(
    tune: Tune, project: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert tune(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert starts(project) == []
