"""Recipes as jobs of a Ray cluster: what a fleet submits."""

from __future__ import annotations

import sys

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.commands.cluster_options import dashboard_address
from quantmint.pipeline.upkeep.fleet.devices import Devices
from tests.upkeep.fleet.staged import Stage, by_name


def test_all_at_once_and_no_device_of_ours(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Devices("HIP_VISIBLE_DEVICES", {0: "0"})
    monkeypatch.setattr("quantmint.pipeline.upkeep.fleet.rounds.devices_of", lambda *_: ours)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    words = f"wait {stage.folder / 'go'}"
    names = [stage.recipe(f"r{number}", words, gpus=8) for number in range(4)]

    began: set[str] = set()

    def hear(line: str) -> None:
        if line.endswith(": [1/2 quantize]"):
            began.add(line.partition(":")[0])
        if began == set(names):  # all of them run
            (stage.folder / "go").touch()

    summary = stage.fleet(hear, on="http://head:8265").run(names)
    assert {name: one.verdict for name, one in by_name(summary).items()} == dict.fromkeys(names, "PASS")
    assert [stage.seen(name)[0]["devices"][0] for name in names] == ["0"] * 4, "of this machine, and unshared"
    assert not (stage.store / "refresh" / "devices").exists()
    assert stage.locks() == []


def test_the_command_of_a_child(stage: Stage) -> None:
    options = stage.options(on="auto", program=("quantmint",), remote="s3://b/c", device="cpu")
    words = options.command_line("a")
    own = ["--device", "cpu", "--remote-store", "s3://b/c"]
    told = ["--ray", "auto", "--attached", "--json", "--store", str(stage.store)]
    assert words == ["quantmint", "submit", "a", *told, "--", *own]
    assert (options.slots(0), stage.options(on="auto", jobs=2).slots(0)) == (sys.maxsize, 2)
    assert (stage.options().slots(3), stage.options().slots(0)) == (3, 1)


def test_where_jobs_go() -> None:
    assert dashboard_address("ray") == "auto", "which Ray's client resolves"
    assert dashboard_address("http://head:8265") == "http://head:8265"
    for wrong in ("ray://head", "head:8265", "http://", "http://a:b@head:8265", "http://head:x", "slurm"):
        with pytest.raises(UserError, match="expected ray "):
            dashboard_address(wrong)
