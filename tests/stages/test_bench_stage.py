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

from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate.validity import _series
from quantmint.eval.measurements import Launch
from quantmint.eval.workloads import Cell
from quantmint.pipeline.base.errors import InvalidMeasurementError
from quantmint.pipeline.runs.runner import RunOutcome
from quantmint.pipeline.serving.host.detect import local_device
from quantmint.pipeline.stages import baseline_launches, launch_series
from quantmint.pipeline.stages.bench import BenchStage, outlook, read_launches, source_of
from tests.processes import processes_naming
from tests.serving.tuning.sweeping import command_in

CELLS = (Cell("c2", 8, 4, 2, 4, 1), Cell("c4", 8, 4, 4, 8, 1, goodput=(("ttft", 500.0),)))
FP8 = {"throughput": {"--kv-cache-dtype": {"fp8": 1.5}}}


@dataclass
class Series:
    """A project whose models are the stand-in's, with so many launches a side."""

    orchestra: Any
    folder: Path
    checkpoint: str = "one"

    def model(self, side: str) -> Path:
        return self.folder / side

    def rules(self, **sides: Mapping[str, object]) -> None:
        """How each side behaves: the stand-in's ``surface.json``."""
        for side in ("baseline", "candidate"):
            self.model(side).mkdir(exist_ok=True)
            (self.model(side) / "config.json").write_text('{"vocab_size": 64}')
            (self.model(side) / "surface.json").write_text(json.dumps({**FP8, **sides.get(side, {})}))

    def stages(self) -> list[Any]:
        quantize = self.orchestra.stage("quantize", option=self.checkpoint)
        return [self.orchestra.stage("source"), quantize, BenchStage()]

    def run(self, **options: Any) -> RunOutcome:
        return self.orchestra.run(*self.stages(), **options)

    def launches(self, **options: Any) -> tuple[Launch, ...]:
        entry = self.run(**options).entry("bench")
        assert entry is not None
        return read_launches(entry.path)

    def starts(self) -> tuple[int, int]:
        """Return how often each side was started."""
        return len(self.lines("baseline", "starts")), len(self.lines("candidate", "starts"))

    def forecast(self) -> dict[str, Any]:
        return outlook(self.orchestra.setting, source=source_of(self.orchestra.plan(*self.stages())[-1]))

    def lines(self, side: str, name: str) -> list[dict[str, Any]]:
        path = self.model(side) / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def series(orchestra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Series]:
    sides = {"source": "baseline", "quantize": "candidate"}
    monkeypatch.setattr(launch_series, "model_folder", lambda entry: tmp_path / sides[entry.stage])

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
    # Of 1000 and 1500 tokens/s, 1200 is the harmonic mean; what is discarded sends half of the prompts.
    seconds = 5 * (started + 4 * (4 + 8) / 1200) + 4 * 4 * (4 + 8) / 1200
    assert ahead["seconds"] == pytest.approx(seconds)
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
    measure = launch_series.LoadClient.measure

    def fatal() -> None:
        def fatal_measure(*args: Any, **options: Any) -> Any:
            result = measure(*args, **options)
            if options["folder"].name == "02-candidate":
                die()
            return result

        monkeypatch.setattr(launch_series.LoadClient, "measure", fatal_measure)
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


@pytest.mark.slow
def test_another_checkpoint_reuses_half_of_the_baselines_launches(series: Callable[..., Series]) -> None:
    made = series(launches=4)
    entry = made.run().entry("bench")
    assert entry is not None
    first = read_launches(entry.path)
    assert (made.starts(), made.forecast()["launches"]) == ((5, 4), 7)
    made.checkpoint = "another"
    planned = made.orchestra.plan(*made.stages())[-1]
    assert BenchStage().seconds_again(planned, 90.0, entry, made.orchestra.setting) == 70.0
    assert BenchStage().seconds_again(planned, 90.0, None, made.orchestra.setting) == 90.0
    forecast = made.forecast()
    assert (forecast["launches"], forecast["reused"], forecast["reused_from"]) == (7, 2, first[-2].started)
    made.orchestra.lines.clear()
    second = made.launches()
    assert made.starts() == (5 + 1 + 2, 4 + 4), "one is discarded, and two are fresh"
    assert "".join("AB"[launch.side == "candidate"] for launch in second) == "AABBAABB"
    assert [launch.number for launch in second] == list(range(8))
    assert [launch.reused for launch in second] == [True] * 2 + [False] * 6
    assert [launch.started for launch in second[:2]] == [
        launch.started for launch in first if launch.side == "baseline"
    ][-2:]
    day = str(first[-1].started)[:10]
    said = "\n".join(made.orchestra.lines)
    assert f"reusing 2 of the baseline's 4 launches, of {day}" in said
    assert "launch 6 of 6: the candidate" in said
    assert "launches a side: 4, 2 of the baseline's reused" in said
    assert made.run().steps[-1].cached
    # The third takes the two fresh ones of the second.
    made.checkpoint = "a third"
    third = made.launches()
    fresh = [launch.started for launch in second if launch.side == "baseline" and not launch.reused]
    assert [launch.started for launch in third if launch.reused] == fresh
    before = made.starts()
    assert not any(launch.reused for launch in made.launches(redo=["bench"]))
    assert made.starts() == (before[0] + 5, before[1] + 4), "made anew by wish"


@pytest.mark.slow
def test_reused_launches_that_disagree_are_made_anew(series: Callable[..., Series]) -> None:
    made = series(launches=4)
    made.launches()
    made.checkpoint = "another"
    slower = {"throughput": {**FP8["throughput"], "--served-model-name": {"model": 0.98}}}
    made.rules(baseline=slower, candidate=slower)
    launches = made.launches()
    assert "".join("AB"[launch.side == "candidate"] for launch in launches) == "BBAAAABB"
    assert not any(launch.reused for launch in launches)
    assert {launch.cells["c2"].output_throughput for launch in launches} == {980.0, 1470.0}
    assert any("disagree with the fresh ones: c2 had 1,000.0 tokens/s and has 980.0" in t for t in made.orchestra.lines)
    assert made.starts() == (5 + 5, 4 + 4)
    assert not any(finding for finding in _series(launches)), "an order that the gate takes"


@pytest.mark.parametrize("redo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_broken_series_goes_on_with_the_launches_that_it_began_with(
    series: Callable[..., Series], monkeypatch: pytest.MonkeyPatch, redo: bool
) -> None:
    made = series(launches=4)
    made.launches()
    made.checkpoint = "another"
    measure = launch_series.LoadClient.measure

    def broken_measure(*args: Any, **options: Any) -> Any:
        if options["folder"].name == "03-baseline":
            raise MeasurementError("pulled the plug")
        return measure(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(launch_series.LoadClient, "measure", broken_measure)
        with pytest.raises(InvalidMeasurementError, match="pulled the plug"):
            made.run()
    made.orchestra.lines.clear()
    launches = made.launches(redo=["bench"] if redo else [])
    if redo:
        assert not any(launch.reused for launch in launches)
        assert not any("there already" in line for line in made.orchestra.lines)
        return
    assert any("3 of 6 launches are there already" in line for line in made.orchestra.lines)
    assert [launch.reused for launch in launches] == [True] * 2 + [False] * 6


@pytest.mark.slow
def test_launches_of_another_baseline_are_not_reused(
    series: Callable[..., Series], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = series(launches=4)
    made.launches()
    setting = made.orchestra.setting
    assert made.forecast()["reused"] == 2
    for changed in (
        replace(setting, workload=replace(setting.workload, cells=CELLS[:1])),
        replace(setting, vllm=replace(setting.vllm, version="0.31.0")),
        replace(setting, image="sha256:other"),
        series(launches=3).orchestra.setting,  # below four all are fresh
        series(launches=4, stop_early=True, min_ratio=1.2).orchestra.setting,
    ):
        made.orchestra.setting = changed
        assert "reused" not in made.forecast()
    made.orchestra.setting = setting
    monkeypatch.setattr(baseline_launches.socket, "gethostname", lambda: "another-machine")
    assert "reused" not in made.forecast()
