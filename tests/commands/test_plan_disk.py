"""The room on the disk that `quantmint plan` foresees, and that a run asks for before it begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.pipeline.stages.quantize import QuantizeStage
from quantmint.pipeline.store.tree import Store

Quantmint = Callable[..., Any]


def test_a_disk_that_is_too_small_here_is_a_caution_for_a_run_elsewhere(
    quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.forecast.free_bytes", lambda path: 10_000_000)
    ended = quantmint("plan", "r.yaml", "--for", "mi300x:8")
    assert ended.code == 0
    assert "are needed where it runs; on this machine" in " ".join(ended.out.split())


@pytest.mark.parametrize("as_json", [False, True])
def test_a_disk_that_is_too_small(
    quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.forecast.free_bytes", lambda path: 10_000_000)
    ended = quantmint("plan", "r.yaml", "--for", "here", *(["--json"] if as_json else []))
    assert ended.code == 2
    assert "10.0 MB are free" in ended.err
    assert ended.err.count("quantmint:") == 1
    if as_json:
        assert ended.json["exit_code"] == 2
    else:
        assert "checkpoint (" in ended.out, "the numbers are shown all the same"


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.usefixtures("large_disk")
def test_a_disk_that_is_too_small_to_publish_to(
    orchestra: Any, quantmint: Quantmint, project: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    orchestra.plan(*(orchestra.stage(key) for key in ("source", "quantize", "publish")))
    published = project / "published"
    monkeypatch.setattr(
        "quantmint.pipeline.runs.preflight.free_bytes", lambda path: 10 if path.is_relative_to(published) else 10**12
    )
    here = ["--for", "here"] if command == "plan" else []
    ended = quantmint(command, "r.yaml", *here)
    assert (ended.code, orchestra.ran) == (2, [])
    assert f"publish.folder: {published / 'r'}: " in ended.err
    assert quantmint(command, "r.yaml", *here, "--json").json["exit_code"] == 2, "one object, which says why"


def test_a_run_refuses_such_a_disk_before_it_begins(
    orchestra: Any, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestra.plan(orchestra.stage("source"), orchestra.stage("quantize", "source"))
    monkeypatch.setattr("quantmint.pipeline.runs.preflight.free_bytes", lambda path: 10_000_000)
    ended = quantmint("run", "r.yaml")
    assert (ended.code, orchestra.ran) == (2, [])
    assert "logs and samples 67.1 MB), 10.0 MB are free" in ended.err


def test_what_an_interrupted_run_has_written_needs_no_room_again(
    orchestra: Any, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestra.plan(orchestra.stage("source"), orchestra.stage("quantize", "source"))
    needed = quantmint("plan", "r.yaml", "--json").json["disk"]["needed"]
    monkeypatch.setattr("quantmint.pipeline.runs.preflight.free_bytes", lambda path: needed["logs and samples"] + 4096)
    assert quantmint("run", "r.yaml").code == 2
    quantize = next(
        stage for stage in quantmint("plan", "r.yaml", "--json").json["stages"] if stage["stage"] == "quantize"
    )
    work = Path("store") / "quantize" / f"{quantize['fingerprint']}.work" / "checkpoint"
    work.mkdir(parents=True)
    (work / "model.safetensors.partial").write_bytes(os.urandom(needed["checkpoint"] - 4096))
    assert Store(Path("store")).begun("quantize", quantize["fingerprint"]) >= needed["checkpoint"] - 4096
    assert quantmint("run", "r.yaml").code == 0


def test_files_of_gptq_need_room_until_they_are_written() -> None:
    size: Any = SimpleNamespace(checkpoint=100, temporary=30)
    setting: Any = None
    rooms = [QuantizeStage().disk(setting, size, begun) for begun in (0, 20, 50)]
    assert rooms == [
        {"checkpoint": checkpoint, "layers of GPTQ": layers} for checkpoint, layers in ((100, 30), (100, 10), (80, 0))
    ]


def test_a_cached_run_needs_no_room(orchestra: Any, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestra.run(orchestra.stage("source"), orchestra.stage("quantize", "source"))
    monkeypatch.setattr("quantmint.pipeline.runs.preflight.free_bytes", lambda path: 0)
    assert quantmint("run", "r.yaml").code == 0
