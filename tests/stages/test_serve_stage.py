"""Serving a side: by the runtime that the recipe names; the launch says what answered."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import Device
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import _StageRunner
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout
from quantmint.pipeline.serving.running.launchers import ClusterLauncher
from quantmint.pipeline.serving.running.log import scan_log
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.serve import SIDES, ServeStage, launch_plan, runtime_modules, runtime_of
from quantmint.pipeline.stages.servers import ReferenceServer, Servers
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.store.tree import Store

LOGS = Path(__file__).parents[1] / "assets" / "server-logs"


@pytest.fixture
def by_reference(project: Path) -> Setting:
    path = project / "r.yaml"
    text = path.read_text().replace("concurrency: 8", "concurrency: 8, runtime: reference")
    path.write_text(text.replace("margin: 0.02}", "margin: 0.02}, throughput: {min_ratio: null}"))
    return open_setting("r.yaml", store=Store(project / "store"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started and stopped, by launchers that start nothing."""
    events: list[str] = []

    @contextmanager
    def starting(self: Any, plan: Any, log: Path, **_: Any) -> Iterator[Callable[[], RunningServer]]:
        which = f"{type(self).__name__} {plan.option('--kv-cache-dtype') or 'auto'}"
        events.append(f"start {which}")
        log.write_text("")

        def ready() -> RunningServer:
            events.append(f"ready {which}")
            return RunningServer("model", "http://127.0.0.1:1", log, 1.0)

        yield ready
        events.append(f"stop {which}")

    @contextmanager
    def talking(argv: list[str], log: Path, **_: Any) -> Iterator[None]:
        which = argv[argv.index("--kv-cache-dtype") + 1] if "--kv-cache-dtype" in argv else "auto"
        events.append(f"start {argv[3]} {which}")
        yield
        events.append(f"stop {argv[3]} {which}")

    monkeypatch.setattr("quantmint.pipeline.serving.running.launchers.LocalLauncher.launch_in_background", starting)
    monkeypatch.setattr("quantmint.pipeline.stages.servers.conversation", talking)
    return events


def test_the_reference_runtime_needs_no_vllm(by_reference: Setting, launches: list[str]) -> None:
    assert by_reference.vllm is None
    with Servers(by_reference, PlainReporter()) as servers:
        for side in ("baseline", "candidate", "candidate"):
            servers.get(side, launch_plan(by_reference, side, Path("m")))  # type: ignore[arg-type]
    assert launches == [
        "start quantmint.pipeline.serving.reference auto", "stop quantmint.pipeline.serving.reference auto",
        "start quantmint.pipeline.serving.reference fp8", "stop quantmint.pipeline.serving.reference fp8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hardware", "free", "together"), [("cpu", 64, True), ("cpu", 4, False), ("mi300x", 512, False)]
)
def test_both_sides_are_there_where_a_cpu_has_room_for_them(
    setting: Setting,
    launches: list[str],
    monkeypatch: pytest.MonkeyPatch,
    hardware: str,
    free: int,
    together: bool,
) -> None:
    monkeypatch.setattr("quantmint.pipeline.stages.servers.free_bytes", lambda device: free << 30)
    target = setting.recipe.target.model_copy(update={"hardware": hardware})
    loaded = replace(setting.loaded, recipe=setting.recipe.model_copy(update={"target": target}))
    setting = replace(setting, loaded=loaded)
    plans = {side: launch_plan(setting, side, Path("m")) for side in SIDES}
    with Servers(setting, PlainReporter()) as servers:
        servers.expect("candidate", plans["candidate"])
        for side in ("baseline", "candidate", "baseline", "candidate"):
            servers.get(side, plans[side])  # type: ignore[index]
    auto, fp8 = "LocalLauncher auto", "LocalLauncher fp8"
    if together:
        started = [f"start {auto}", f"start {fp8}", f"ready {auto}", f"ready {fp8}"]
        assert launches == [*started, f"stop {fp8}", f"stop {auto}"]
    else:
        turns = [auto, fp8] * 2
        assert launches == [f"{event} {which}" for which in turns for event in ("start", "ready", "stop")]


def test_the_server_that_comes_next_is_expected_as_soon_as_there_is_what_it_serves(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.runner.model_folder", Path)
    said: list[tuple[str, str]] = []
    servers = SimpleNamespace(expect=lambda side, plan: said.append((side, plan.model)))
    plan = build_plan(setting)
    after = [planned.key for planned in plan].index("serve-baseline") + 1
    for entries in ({"source": "the source"}, {"source": "the source", "quantize": "the checkpoint"}):
        _StageRunner(setting, PlainReporter(), servers, (), entries).expect(plan[after:])  # type: ignore[arg-type]
    assert said == [("candidate", "the checkpoint")]


def test_a_fresh_server_is_nobody_else_s(setting: Setting, launches: list[str], tmp_path: Path) -> None:
    plan = launch_plan(setting, "baseline", Path("m"))
    with Servers(setting, PlainReporter()) as servers:
        kept = servers.get("baseline", plan)
        with servers.fresh("baseline", plan, tmp_path / "logs" / "fresh.log") as fresh:
            assert fresh is not kept
            assert fresh.log_path == tmp_path / "logs" / "fresh.log"
            one = [f"{event} LocalLauncher auto" for event in ("start", "ready", "stop")]
            assert launches == [*one, *one[:2]]
        assert launches[5:] == one[2:]
        servers.get("baseline", plan)
    assert launches[6:] == one


def test_what_answers_is_in_the_fingerprint(setting: Setting, by_reference: Setting) -> None:
    served, by_library = ({planned.key: planned for planned in build_plan(which)} for which in (setting, by_reference))
    assert served["quantize"].fingerprint == by_library["quantize"].fingerprint
    for key in ("serve-baseline", "serve-candidate", "canary-baseline", "evaluate-baseline"):
        assert served[key].fingerprint != by_library[key].fingerprint
    stage = ServeStage("candidate")
    assert (stage.settings(setting)["runtime"], stage.settings(by_reference)["runtime"]) == ("vllm", "reference")
    assert list(stage.tools(setting)) == ["vllm"]
    assert list(stage.tools(by_reference)) == ["transformers", "torch"]
    assert "bench" in served
    assert "bench" not in by_library


def test_the_container_that_serves_is_in_the_fingerprint(setting: Setting) -> None:
    """And of nothing that makes the checkpoint; outside a container there is no word of it."""
    outside, inside = (
        {planned.key: planned for planned in build_plan(replace(setting, image=image))}
        for image in (None, f"rocm/vllm@sha256:{'1' * 64}")
    )
    same = [key for key, planned in outside.items() if planned.fingerprint == inside[key].fingerprint]
    assert same == ["source", "calibrate", "quantize", "inspect"]
    assert all("image" not in str(planned.payload["settings"]) for planned in outside.values())


def test_vllm_ran_where_its_log_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def here(kind: str) -> Device:
        asked.append(kind)
        return Device("mi300x", "AMD Instinct MI300X")

    monkeypatch.setattr("quantmint.pipeline.stages.serve.local_device", here)
    monkeypatch.setattr(RunningServer, "version", lambda self: "0.32.0")
    log = LOGS / "rocm-0.32.log"
    server = RunningServer("model", "http://127.0.0.1:1", log, 1.0)
    found = runtime_of(server, scan_log(log.read_text()), log)
    assert (found["runtime"], found["version"], found["kv_cache_dtype"]) == ("vllm 0.32.0", "vllm 0.32.0", "fp8")
    on_cpu = tmp_path / "server.log"
    on_cpu.write_text(log.read_text().replace("device_config=cuda", "device_config=cpu"))
    runtime_of(server, scan_log(on_cpu.read_text()), on_cpu)
    assert asked == ["cuda", "cpu"]


def test_the_reference_runtime_says_itself_what_it_is(tmp_path: Path) -> None:
    facts = {
        "runtime": "transformers 5, FP8 KV cache",
        "version": "transformers 5",
        "device": {"hardware": "cpu", "name": "EPYC"},
        "kv_cache_dtype": "fp8",
    }

    class Talk:
        def ask(self, message: object) -> object:
            return facts if message == {"facts": {}} else None

    server = ReferenceServer("model", "a socket", tmp_path / "log", 1.0, talk=Talk())  # type: ignore[arg-type]
    assert runtime_of(server, scan_log(""), tmp_path / "log") == facts


def test_a_launch_over_nodes_is_the_clusters(setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events: list[str] = []

    class Nodes:
        def cluster(self) -> str:
            events.append("asked")
            return "a cluster"

        def release(self) -> None:
            events.append("released")

    @contextmanager
    def starting(
        self: ClusterLauncher, plan: LaunchPlan, log_path: Path, **_: object
    ) -> Iterator[Callable[[], RunningServer]]:
        events.append(f"launched on {self.cluster}")
        yield lambda: RunningServer("m", "http://127.0.0.1:1", log_path, 0.0)

    monkeypatch.setattr(ClusterLauncher, "launch_in_background", starting)
    plan = replace(launch_plan(setting, "baseline", Path("m")), layout=ParallelLayout(tensor=8, pipeline=2, nodes=2))
    with Servers(setting, PlainReporter()) as servers, pytest.raises(UserError, match=r"(?s)over 2 nodes.*--on ray"):
        servers.get("baseline", plan)
    with Servers(replace(setting, spread=Nodes()), PlainReporter()) as servers:  # type: ignore[arg-type]
        servers.get("baseline", plan)
    assert events == ["asked", "released", "launched on a cluster"]


def test_what_the_reference_runtime_imports_is_installed_with_it() -> None:
    """accelerate, which lm-eval's models of transformers import, came with nothing that the documents install."""
    runtime = SimpleNamespace(recipe=SimpleNamespace(evaluation=SimpleNamespace(runtime="reference")))
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert ("evaluate", "accelerate") in runtime_modules(runtime)  # type: ignore[arg-type]
    for extra, module in runtime_modules(runtime):  # type: ignore[arg-type]
        assert any(re.match(rf"{module}\b", requirement) for requirement in extras[extra]), (extra, module)
