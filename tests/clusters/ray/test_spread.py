"""Stages over three real nodes: one process' bytes, also where nodes go and the driver is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.calibration.calibrate import Execution, calibrate
from quantmint.calibration.observers import Observation
from quantmint.calibration.ranges import Ranges
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.clusters.ray.spread import RaySpread
from quantmint.pipeline.commands.cli import main
from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, Written, scale_ranges, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.engines.stream.schedule import Order
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.reader import read_structure
from tests.bench.model import Shape, write_model
from tests.clusters.ray.conftest import ROOT, Nodes, Told

pytestmark = pytest.mark.slow
FAT = Shape(hidden=1024, intermediate=2816, heads=8, kv_heads=4, gigabytes=0.2)


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def spread(nodes: Nodes, told: Told) -> Iterator[RaySpread]:
    made = RaySpread(nodes.address, "auto", told)
    yield made
    made.release()


@pytest.fixture(scope="module")
def fat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in many files, each of which takes a while in MXFP4."""
    folder = tmp_path_factory.mktemp("fat") / "model"
    write_model(folder, FAT, 6, 12, vocabulary=1024)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def tensors(ranges: Ranges) -> dict[str, list[float]]:
    tables = {"input": ranges.inputs, "k": ranges.keys, "v": ranges.values}
    return {f"{name}.{kind}": amax.tolist() for kind, table in tables.items() for name, amax in table.items()}


def measured(folder: Path, blocks: Any, observation: Observation, work: Path, told: Any, **options: Any) -> Ranges:
    batches = blocks[:, :32].split(2)
    return calibrate(folder, batches, observation, Execution(["cpu"], work, **options), watcher=told).ranges


def written(folder: Path, scheme: str, ranges: Ranges | None, out: Path, **options: Any) -> Written:
    source = open_checkpoint(folder)
    structure = read_structure(folder, source.tensors)
    choice = Choice(dict.fromkeys(structure.linear, scheme), structure.kept, ranges is not None)
    plans = plan_shards(source, structure, choice, "compressed-tensors", shared_scales=True)
    static: Mapping[str, Any] = {} if ranges is None else scale_ranges(ranges, choice, "compressed-tensors")
    return write_checkpoint(
        CheckpointPlan(source, plans, choice, static, checkpoint_format="compressed-tensors"),
        out,
        manifest=out.with_suffix(".jsonl"),
        **options,
    )


def test_a_node_with_another_version_is_refused(nodes: Nodes, spread: RaySpread, told: Told, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    (odd / "safetensors-0.0.1.dist-info").mkdir(parents=True)
    (odd / "safetensors-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: safetensors\nVersion: 0.0.1\n"
    )
    spread.require_same([], [tmp_path])
    node = nodes.add(env_vars={"PYTHONPATH": str(odd)})
    try:
        with pytest.raises(UserError, match=rf"node {node.node_id[:8]}\): safetensors is 0\.0\.1 there and .* here"):
            spread.require_same([], [tmp_path])
    finally:
        nodes.remove(node)
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


@pytest.mark.parametrize(
    ("model", "observation", "schemes"),
    [
        ("llama", Observation(), ("ptpc_fp8", "fp8")),
        ("qwen3-moe", Observation(inputs="mse", cache="percentile", experts="routed", min_expert_tokens=200), ("fp8",)),
        ("qwen3-moe", Observation(inputs="percentile", cache="mse"), ("mxfp4",)),
    ],
)
def test_bytes_are_those_of_one_process(
    spread: RaySpread,
    told: Told,
    models: Callable[..., Path],
    blocks: Any,
    tmp_path: Path,
    model: str,
    observation: Observation,
    schemes: tuple[str, ...],
) -> None:
    folder = models(model, sharded=True)
    alone = measured(folder, blocks, observation, tmp_path / "alone", told)
    places = spread.places(folder)
    assert len(places.free) == 3
    shared = measured(folder, blocks, observation, tmp_path / "work", told, elsewhere=places)
    assert tensors(shared) == tensors(alone)
    assert len(tensors(shared)) > 10
    for scheme in schemes:
        one, other = tmp_path / f"{scheme}-one", tmp_path / f"{scheme}-other"
        here = written(folder, scheme, alone, one)
        there = written(folder, scheme, shared, other, write=spread.write_shards)
        assert len(there.shards) > 2
        assert files(other) == files(one)
        assert there.shards == here.shards
        assert json.loads(other.with_suffix(".jsonl").read_text().splitlines()[0])["sha256"]


def test_a_node_is_lost_while_ranges_are_measured(
    nodes: Nodes, spread: RaySpread, told: Told, models: Callable[..., Path], blocks: Any, tmp_path: Path
) -> None:
    nodes.at_least(3)

    class Loses(Told):
        def bar(self, total: int, unit: str) -> Any:
            from contextlib import nullcontext

            lost: list[int] = []

            def advance(count: int) -> None:
                if count and not lost:
                    lost.append(count)
                    nodes.lose_one()

            return nullcontext(advance)

    folder = models("llama", sharded=True)
    alone = measured(folder, blocks, Observation(), tmp_path / "alone", told)
    places = spread.places(folder)
    options = {"elsewhere": places, "mode": "layer"}
    assert tensors(measured(folder, blocks, Observation(), tmp_path / "work", Loses(), **options)) == tensors(alone)


def test_a_node_is_lost_while_it_writes(nodes: Nodes, spread: RaySpread, fat: Path, tmp_path: Path) -> None:
    nodes.at_least(2)
    out, write = tmp_path / "out", spread.write_shards
    committed: list[str] = []
    orphans: set[str] = set()

    def lost(process: int, destination: Path) -> bool:
        return nodes.lose_what_runs(process, lambda: process in writing(destination))

    def losing(order: Order) -> Any:
        def at_first(shard: Any, path: Path) -> None:
            order.commit(shard, path)
            committed.append(shard.name)
            if len(committed) == 1:
                while not any(lost(process, order.destination) for process in writing(order.destination)):
                    pass
            if len(committed) == len(order.plans):
                orphans.update(path.name for path in order.destination.glob(f"*{PARTIAL_SUFFIX}"))

        return write(replace(order, commit=at_first))

    written(fat, "mxfp4", None, out, write=losing)
    assert len(orphans) == 1  # what the lost node was at was made again, and nothing else
    assert sorted(committed) == sorted(path.name for path in fat.glob("*.safetensors"))
    assert not list(out.glob(f"*{PARTIAL_SUFFIX}"))
    written(fat, "mxfp4", None, tmp_path / "alone")
    assert files(out) == files(tmp_path / "alone")


def writing(folder: Path) -> list[int]:
    """The processes that have a file there open that is not committed."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)) and target.endswith(PARTIAL_SUFFIX):
            found.append(int(entry.parts[2]))
    return found


def test_a_killed_driver_is_gone_on_with(
    nodes: Nodes, spread: RaySpread, fat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread.release()
    out = tmp_path / "out"
    command = ["quantize", str(fat), str(out), "--scheme", "mxfp4", "--no-inspect"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "quantmint", *command, "--on", "ray"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (manifests := list(tmp_path.rglob("manifest.jsonl"))) or not manifests[0].read_text().count("\n"):
            assert driver.poll() is None, driver.stderr and driver.stderr.read()
            time.sleep(0.01)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    # From elsewhere, which is another way to reach the same cluster.
    before = {path.name: path.stat().st_ino for path in tmp_path.rglob("model-*.safetensors")}
    assert 0 < len(before) < len(list(fat.glob("*.safetensors")))
    with pytest.raises(SystemExit) as ended:
        main([*command, "--on", nodes.client])
    assert ended.value.code == 0, capsys.readouterr()
    kept = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert {name: kept[name] for name in before} == before
    written(fat, "mxfp4", None, tmp_path / "alone")
    weights = {name: data for name, data in files(tmp_path / "alone").items() if name.endswith(".safetensors")}
    assert {name: data for name, data in files(out).items() if name in weights} == weights
