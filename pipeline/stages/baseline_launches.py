"""Launches of a baseline, shared by the recipes of one model on one machine.

    store/launches/<SHA-256 of model, launch plan, cells, vLLM, image and machine>/<start>-<number>.json

A later series reuses the newest of them in place of half of its own, if they agree with the other half
(`eval.gate.validity.disagreement`, docs/gate.md).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate.validity import is_sound
from quantmint.eval.measurements import Launch, reusable
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.serving.host.detect import CUDA, detect, local_device, nvidia_smi, select_devices
from quantmint.pipeline.stages.serve import ServeStage, image_settings, vllm_version
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import write_json
from quantmint.pipeline.store.tree import LAUNCHES


@dataclass(frozen=True, slots=True)
class BaselineLaunches:
    """Stored measurements (launches) of one baseline, in a folder of the store, which later series may reuse."""

    folder: Path

    def newest(self, count: int) -> tuple[Launch, ...]:
        """Return the newest `count` launches, the earliest first; empty where there are fewer.

        Damaged files are skipped.
        """
        launches: list[Launch] = []
        for path in sorted(self.folder.glob("*.json"), reverse=True):
            try:
                launches.append(Launch.from_json(read_json(path)))
            except (MeasurementError, QuantmintError):  # written on a disk that was full, or by another version
                continue
            if len(launches) == count:
                os.utime(self.folder)  # the collection of garbage removes what nobody used in a month
                return tuple(reversed(launches))
        return ()

    def add(self, launches: Sequence[Launch], argv: Sequence[str]) -> None:
        """Store the sound, fresh baseline launches of a finished series; `argv` is the baseline's command line."""
        for launch in launches:
            if launch.side == "candidate" or launch.reused or not is_sound(launch, argv):
                continue
            self.folder.mkdir(parents=True, exist_ok=True)
            started = (launch.started or "").replace(":", "").replace("+0000", "Z")
            write_json(self.folder / f"{started}-{launch.number:02}.json", launch.to_json())


def baseline_launches(setting: Setting, model: str, version: int) -> BaselineLaunches:
    """Return the stored launches of the recipe's baseline on this machine, under the same plan, cells and vLLM.

    `model` is the fingerprint of the source's entry, `version` that of the stage that measures.
    """
    determined_by = {
        "model": model,
        "launch": ServeStage("baseline").settings(setting)["launch"],
        "hardware": setting.recipe.target.hardware,
        "cells": [cell.to_json() for cell in setting.workload.cells],
        "machine": _machine(setting),
        "version": version,
        **vllm_version(setting),
        **image_settings(setting),
    }
    return BaselineLaunches(setting.store.root / LAUNCHES / fingerprint(determined_by))


def launches_to_reuse(setting: Setting, model: str, version: int) -> tuple[Launch, ...]:
    """Return the stored baseline launches that a new series would reuse; empty where it measures all of them itself.

    A series that may end early reuses none, because its sequential test needs sides that take turns. `model` and
    `version` are as in `baseline_launches`.
    """
    gate = setting.recipe.gate.throughput
    count = 0 if gate.stop_early else reusable(gate.launches)
    if not count:
        return ()
    launches = baseline_launches(setting, model, version).newest(count)
    return tuple(replace(launch, number=number, reused=True) for number, launch in enumerate(launches))


def _machine(setting: Setting) -> dict[str, object]:
    """Return the identity of this machine and its visible devices: host name, device name, and the GPUs' UUIDs."""
    machine = Host()
    kind = hardware(setting.recipe.target.hardware).kind
    device = local_device("cpu" if kind == "cpu" else "cuda", machine)
    uuids: list[str] = []
    if device.hardware != "cpu":
        rows = [row[0] for row in nvidia_smi(machine, ("uuid",))]
        uuids = [gpu.uuid for gpu in detect(machine).devices]
        uuids = uuids or [rows[index] for index in select_devices(machine.environ.get(CUDA), rows)]
    return {"host": socket.gethostname(), "device": device.name, "gpus": uuids}
