"""A run whose checkpoint is made from a changed copy of the source: what inspection sees is a faithful copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantmint.pipeline.quantize.digest import file_digests
from quantmint.pipeline.runs import planner
from quantmint.pipeline.stages.inspect import InspectStage
from quantmint.pipeline.stages.quantize import QuantizeStage
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import LOCATION, model_folder
from quantmint.pipeline.stages.stage import Job, Output, Stage, write_json
from quantmint.pipeline.store.entries import Entry

Change = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Remade:
    """A copy of the source, changed; ``name`` tells it from others in its fingerprint."""

    name: str
    change: Change
    key: str = "remade"
    family: str = "source"
    version: int = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(Stage(), name)

    def when_stopped(self) -> Remade:
        return self

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        return {"source": "source"}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        return {"change": self.name}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        return {}

    def intact(self, entry: Entry, setting: Setting) -> bool:
        return True

    def run(self, job: Job) -> Output:
        folder = job.setting.home / f"{self.name}-model"
        shutil.copytree(model_folder(job.inputs["source"]), folder)
        self.change(folder)
        files = {name: {"size": size} for name, (size, _) in file_digests(folder, job.setting.store.root).items()}
        write_json(job.path / LOCATION, {"folder": str(folder), "files": files})
        return Output({}, self.name)


@dataclass(frozen=True, slots=True)
class QuantizeRemade(QuantizeStage):
    def inputs(self, setting: Setting) -> Mapping[str, str]:
        return {**QuantizeStage.inputs(self, setting), "source": "remade"}


@dataclass(frozen=True, slots=True)
class InspectRemade(InspectStage):
    def inputs(self, setting: Setting) -> Mapping[str, str]:
        return {**InspectStage.inputs(self, setting), "source": "remade"}


def plan_with(remade: Remade, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on plans make their checkpoint from it; what concerns the baseline is as it was."""
    monkeypatch.setattr(planner, "stages_of", _with(remade, planner.stages_of))


def _with(remade: Remade, stages_of: Callable[[Setting], Sequence[Stage]]) -> Callable[[Setting], tuple[Any, ...]]:
    replaced: dict[str, tuple[Any, ...]] = {"quantize": (remade, QuantizeRemade()), "inspect": (InspectRemade(),)}
    return lambda setting: tuple(one for stage in stages_of(setting) for one in replaced.get(stage.key, (stage,)))


def four_times_too_large(folder: Path) -> None:
    """One layer's projections times 4, a power of two: in FP8 the same bytes, with scales times 4."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".layers.1." in name and name.endswith("proj.weight")]:
        tensors[name] = tensors[name] * 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def another_template(folder: Path) -> None:
    """The same weights and words; conversations are written down in another way."""
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
