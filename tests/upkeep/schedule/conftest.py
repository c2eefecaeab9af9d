"""Recipes with schedules, in a folder that is the working directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.upkeep.schedule.export import Scheduled, scheduled

Written = Callable[..., Scheduled]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """``written("0 3 * * 6", zone, name=..., target={...})``: a recipe in ./recipes, with a schedule."""
    monkeypatch.chdir(tmp_path)

    def write(expression: str, zone: str = "UTC", *, name: str = "mine", **more: Any) -> Scheduled:
        path = tmp_path / "recipes" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        recipe = {
            "name": name,
            "source": {"folder": "model"},
            "quantization": {"scheme": "ptpc_fp8"},
            "target": {"hardware": "mi300x", "gpus": 2},
            "refresh": {"schedule": expression, "timezone": zone},
            "gate": {"throughput": {"min_ratio": None}},
            "publish": {"folder": "published", "licence": {"id": "apache-2.0"}},
        }
        path.write_text(yaml.safe_dump(recipe | more), encoding="utf-8")
        (found,) = scheduled([name])
        return found

    return write


class Called:
    """How a command ended, and what it wrote."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def schedule(capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    """Call `quantmint schedule` in this process."""
    from quantmint.pipeline.commands.cli import main

    def call(*arguments: object) -> Called:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["schedule", *(str(argument) for argument in arguments)])
        return Called(int(ended.value.code or 0), *capsys.readouterr())

    return call
