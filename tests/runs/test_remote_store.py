"""A second site takes what the first has measured, and nothing that is not the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.base.machine import Device
from quantmint.pipeline.serving.host.detect import local_device
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.objects import Objects
from quantmint.pipeline.store.remote import RemoteTier
from quantmint.pipeline.store.tree import Store

MI300X = Device("mi300x", "AMD Instinct MI300X")


@dataclass
class Site:
    """A store of its own beside the same tier."""

    orchestra: Any
    root: Path
    url: str
    device: Device = MI300X
    warnings: list[str] = field(default_factory=list)

    def run(self, *stages: Any, **options: Any) -> Any:
        tier = RemoteTier(Objects(self.url), self.warnings.append, lambda kind: self.device)
        self.orchestra.setting = replace(self.orchestra.setting, store=Store(self.root), remote=tier)
        Path(self.orchestra.trace).unlink(missing_ok=True)
        return self.orchestra.run(*stages, **options)


@pytest.fixture
def site(orchestra: Any, tmp_path: Path) -> Callable[..., Site]:
    return lambda name, **options: Site(orchestra, tmp_path / name, f"file://{tmp_path}/tier", **options)


@pytest.fixture
def baseline(orchestra: Any) -> Callable[..., list[Any]]:
    """What concerns a 16-bit model, and a checkpoint beside it whose bytes are ``weights``."""

    def make(weights: str = "8 bit", device: Device = MI300X) -> list[Any]:
        def serve(job: Job) -> None:
            (job.path / "launch.json").write_text(json.dumps({"device": asdict(device)}))

        def quantize(job: Job) -> None:
            (job.path / "checkpoint").mkdir()
            (job.path / "checkpoint" / "model.safetensors").write_text(weights)
            (job.path / "environment.json").write_text(str(job.path))  # of the machine, not of the checkpoint

        return [
            orchestra.stage("source", work=lambda job: (job.path / "location.json").write_text(str(job.path))),
            orchestra.stage("serve-baseline", "source", family="serve", work=serve),
            orchestra.stage("evaluate-baseline", "serve-baseline", family="evaluate"),
            orchestra.stage("quantize", "source", work=quantize),
            orchestra.stage("inspect", "quantize", result={"verdict": "PASS"}),
        ]

    return make


def test_a_second_site_measures_nothing_again(site: Any, baseline: Any, orchestra: Any) -> None:
    site("one").run(*baseline())
    two = site("two")
    outcome = two.run(*baseline())
    assert orchestra.ran == ["source", "quantize"]  # a path of that machine, and weights
    assert [step.cached for step in outcome.steps] == [False, True, True, False, True]
    assert outcome.entry("evaluate-baseline").file("out").read_text() == "evaluate-baseline"
    assert two.warnings == []
    outcome.entry("evaluate-baseline").verify()
    two.run(*baseline())
    assert orchestra.ran == []


def test_what_was_measured_of_other_bytes_is_not_taken(site: Any, baseline: Any, orchestra: Any) -> None:
    site("one").run(*baseline())
    site("two").run(*baseline(weights="other bits"))
    assert orchestra.ran == ["source", "quantize", "inspect"]


def test_what_was_measured_on_another_device_is_not_taken(site: Any, baseline: Any, orchestra: Any) -> None:
    site("one").run(*baseline())
    other = Device("mi355x", "AMD Instinct MI355X")
    site("two", device=other).run(*baseline(device=other))
    assert orchestra.ran == ["source", "serve-baseline", "evaluate-baseline", "quantize"]


def test_damage_is_noticed_told_and_mended(site: Any, baseline: Any, orchestra: Any, tmp_path: Path) -> None:
    site("one").run(*baseline())
    (damaged,) = (tmp_path / "tier").glob("evaluate/*/*/out")
    damaged.write_text("evaluate-BASELINE")
    two = site("two")
    two.run(*baseline())
    assert orchestra.ran == ["source", "evaluate-baseline", "quantize"]
    (warning,) = two.warnings
    assert "evaluate is made here" in warning
    assert "SHA-256" in warning
    three = site("three")
    three.run(*baseline())
    assert orchestra.ran == ["source", "quantize"]
    assert three.warnings == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 2}, "expected schema 1"),
        ({"folder": "../../../etc"}, "its folder is no name of 16 hex digits"),
        ({"device": {"hardware": "cpu", "name": "a CPU"}}, "something else has one"),
        ({"more": 1}, "it has the wrong shape"),
    ],
)
def test_a_parcel_that_lies_is_refused(
    site: Any, baseline: Any, orchestra: Any, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    site("one").run(*baseline())
    (parcel,) = (tmp_path / "tier" / "evaluate").glob("*.json")
    data = json.loads(parcel.read_text())
    parcel.write_text(json.dumps({**data, **change}))
    two = site("two")
    two.run(*baseline())
    assert orchestra.ran == ["source", "evaluate-baseline", "quantize"]
    (warning,) = two.warnings
    assert told in warning
    site("three").run(*baseline())
    assert "evaluate-baseline" not in orchestra.ran  # the second site put a sound one in its place


def test_a_parcel_of_another_entry_is_refused(site: Any, baseline: Any, orchestra: Any, tmp_path: Path) -> None:
    """Its files are sound and those of its record: it is the name under which it lies that is another's."""
    site("one").run(*baseline())
    (parcel,) = (tmp_path / "tier" / "evaluate").glob("*.json")
    (other,) = (tmp_path / "tier" / "inspect").glob("*.json")
    parcel.write_bytes(other.read_bytes())
    two = site("two")
    two.run(*baseline())
    assert orchestra.ran == ["source", "evaluate-baseline", "quantize"]
    (warning,) = two.warnings
    assert f"it is of inspect/{other.stem[:12]}" in warning


class Away:
    """A place that does not answer."""

    url = "s3://bucket"

    def __init__(self) -> None:
        self.asked = 0

    def read(self, name: str) -> None:
        self.asked += 1
        raise StageError("bucket: could not read: timed out")


def test_a_tier_that_is_away_is_asked_once_and_spoils_nothing(baseline: Any, orchestra: Any) -> None:
    away, warnings = Away(), []
    tier = RemoteTier(away, warnings.append, local_device)  # type: ignore[arg-type]
    orchestra.setting = replace(orchestra.setting, remote=tier)
    outcome = orchestra.run(*baseline())
    assert len(outcome.steps) == 5
    assert away.asked == 1
    assert warnings == ["the remote store is left out: bucket: could not read: timed out"]
