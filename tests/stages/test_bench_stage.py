"""The bench stage against a stand-in for vLLM: turns, seeds, resumption, loads that void a series."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.errors import InvalidMeasurementError
from quantmint.pipeline.runs.runner import RunOutcome
from quantmint.pipeline.serving.host.detect import local_device
from quantmint.pipeline.stages import bench
from quantmint.pipeline.stages.bench import BenchStage, outlook, read_launches
from tests.processes import processes_naming
from tests.serving.tuning.sweeping import command_in

CELLS = (Cell("c2", 8, 4, 2, 4, 1), Cell("c4", 8, 4, 4, 8, 1, goodput=(("ttft", 500.0),)))
FP8 = {"throughput": {"--kv-cache-dtype": {"fp8": 1.5}}}


@dataclass
class Series:
    """A project whose models are the stand-in's, with so many launches a side."""

    orchestra: Any
    folder: Path

    def model(self, side: str) -> Path:
        return self.folder / side

    def rules(self, **sides: Mapping[str, object]) -> None:
        """How each side behaves: the stand-in's ``surface.json``."""
        for side in ("baseline", "candidate"):
            self.model(side).mkdir(exist_ok=True)
            (self.model(side) / "config.json").write_text('{"vocab_size": 64}')
            (self.model(side) / "surface.json").write_text(json.dumps({**FP8, **sides.get(side, {})}))

    def stages(self) -> list[Any]:
        return [self.orchestra.stage("source"), self.orchestra.stage("quantize"), BenchStage()]

    def run(self, **options: Any) -> RunOutcome:
        return self.orchestra.run(*self.stages(), **options)

    def lines(self, side: str, name: str) -> list[dict[str, Any]]:
        path = self.model(side) / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def series(orchestra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Series]:
    sides = {"source": "baseline", "quantize": "candidate"}
    monkeypatch.setattr(bench, "model_folder", lambda entry: tmp_path / sides[entry.stage])

    def make(launches: int = 2, cells: tuple[Cell, ...] = CELLS, **gate_options: Any) -> Series:
        setting = orchestra.setting
        recipe = setting.recipe
        throughput = recipe.gate.throughput.model_copy(update={"launches": launches, **gate_options})
        gate = recipe.gate.model_copy(update={"throughput": throughput})
        loaded = replace(setting.loaded, recipe=recipe.model_copy(update={"gate": gate}))
        orchestra.setting = replace(
            setting,
            loaded=loaded,
            workload=replace(setting.workload, cells=cells),
            vllm=replace(setting.vllm, executable=command_in(tmp_path)),
        )
        made = Series(orchestra, tmp_path)
        made.rules()
        return made

    return make


def test_launches_end_as_soon_as_every_cell_is_decided(series: Callable[..., Series]) -> None:
    """1.5 times as fast each time: at 65 % confidence two a side show more than 1.2, and no third is made."""
    made = series(launches=4, stop_early=True, min_ratio=1.2, confidence=0.65)
    entry = made.run().entry("bench")
    assert entry is not None
    assert [launch.number for launch in read_launches(entry.path)] == [0, 1, 2, 3]
    assert any("decided after 2 launches a side of at most 4" in line for line in made.orchestra.lines)
    assert "launches a side: 2" in str(entry.record.result["summary"])
    assert outlook(made.orchestra.setting)["stop_early"]


def test_sides_take_turns_on_fresh_servers(series: Callable[..., Series]) -> None:
    made = series(launches=2)
    outcome = made.run()
    entry = outcome.entry("bench")
    assert entry is not None
    launches = read_launches(entry.path)
    assert [launch.side for launch in launches] == ["baseline", "candidate", "candidate", "baseline"]
    assert [launch.number for launch in launches] == [0, 1, 2, 3]
    # The first one of all is discarded, and every cell has its own prompts before it.
    assert [len(made.lines(side, "starts")) for side in ("baseline", "candidate")] == [3, 2]
    assert [load["start"] for load in made.lines("baseline", "loads")] == [2, 2, 3, 3]
    discarded = [tuple(asked["prompt"]) for side in ("baseline", "candidate") for asked in made.lines(side, "asked")]
    assert len(discarded) == 5 * 2 * (2 + 4)
    assert len(set(discarded)) == 3 * 2 * (2 + 4), "the same of both sides, and new ones in each pair"
    assert all(launch.cells.keys() == {"c2", "c4"} for launch in launches)
    assert {launch.kv_tokens for launch in launches} == {12345}
    assert {launch.device for launch in launches} == {local_device("cuda").name}
    assert [launch.cells["c4"].goodput is None for launch in launches] == [False] * 4
    assert entry.record.result["ratios"] == {"c2": 1.5, "c4": 1.5}
    assert entry.record.result["faults"] == []
    ahead = outlook(made.orchestra.setting)
    assert (ahead["launches"], ahead["prompts"], ahead["noise"], ahead["ratio"]) == (5, 4 + 4 + 8 + 8, 0, 1.5)
    started = sum(launch.started_seconds for launch in launches) / 4
    answers = 4 * (4 + 4 + 8 + 8)
    assert ahead["seconds"] == pytest.approx(5 * (started + answers / 1200))  # 1200: harmonic, of 1000 and 1500
    assert "c2 1.50x, c4 1.50x; launches a side: 2" in str(entry.record.result["summary"])
    assert sorted(path.name for path in (entry.path / "launches" / "02-candidate").iterdir()) == [
        "c2.json", "c2.log", "c4.json", "c4.log", "launch.json", "server.log",
    ]  # fmt: skip
    assert [step.cached for step in made.run().steps] == [True] * 3


@pytest.mark.slow
def test_killed_in_the_third_launch(
    series: Callable[..., Series],
    forked: Callable[[Callable[[], None]], int],
    code_of: Callable[[int], int],
    die: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = series(launches=2)
    measure = bench.LoadClient.measure

    def fatal() -> None:
        def fatal_measure(*args: Any, **options: Any) -> Any:
            result = measure(*args, **options)
            if options["folder"].name == "02-candidate":
                die()
            return result

        monkeypatch.setattr(bench.LoadClient, "measure", fatal_measure)
        made.run()

    assert code_of(forked(fatal)) == -signal.SIGKILL
    outcome = made.run()
    entry = outcome.entry("bench")
    assert entry is not None
    assert [launch.number for launch in read_launches(entry.path)] == [0, 1, 2, 3]
    # The third launch is made again from its start; the first two are not. One was discarded in each run.
    assert [len(made.lines(side, "starts")) for side in ("baseline", "candidate")] == [4, 3]
    assert any("2 of 4 launches are there already" in line for line in made.orchestra.lines)
    assert any(re.search(r"100 % of 4 cells", line) for line in made.orchestra.lines), "what is left is counted"
    assert not processes_naming(str(made.folder / "bin"))


@pytest.mark.slow
def test_a_lost_request_voids_the_measurement(series: Callable[..., Series]) -> None:
    made = series(launches=2)
    made.rules(candidate={"lose": [2]})
    with pytest.raises(
        InvalidMeasurementError, match=r"bench candidate: .*3 of 4 requests completed, 1 failed"
    ) as caught:
        made.run()
    assert caught.value.exit_code == 4
    made.rules()
    made.run()
    assert [len(made.lines(side, "starts")) for side in ("baseline", "candidate")] == [4, 3]


def test_answers_without_text_void_the_measurement(series: Callable[..., Series]) -> None:
    made = series(launches=1)
    made.rules(baseline={"mute": True})
    with pytest.raises(InvalidMeasurementError, match="16 tokens came back as 0 characters"):
        made.run()
    assert not made.lines("baseline", "loads")


def test_what_the_result_depends_on(series: Callable[..., Series], tmp_path: Path) -> None:
    made = series()
    setting = made.orchestra.setting

    def fingerprint() -> str:
        return made.orchestra.plan(*made.stages())[-1].fingerprint

    seen = {fingerprint()}
    for changed in (
        replace(setting, workload=replace(setting.workload, cells=(CELLS[0], replace(CELLS[1], rate=2.0)))),
        series(launches=3).orchestra.setting,
        replace(setting, vllm=replace(setting.vllm, version="0.31.0")),
    ):
        made.orchestra.setting = changed
        seen.add(fingerprint())
    assert len(seen) == 4
