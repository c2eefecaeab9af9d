"""The parts of a stage on the nodes of a Ray cluster: shards of a checkpoint, shares of the calibration batches.

Parts are plain tasks of Ray: it chooses the nodes, repeats what was lost with one, and tells what is finished. Files go
by the filesystem that the nodes share, plans and results through Ray, which are small. What is committed is committed
by this process: one manifest, in which a run without a cluster finds the same.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quantmint.calibration.calibrate import Order, Share
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.clusters.ray import tasks
from quantmint.pipeline.clusters.ray.nodes import (
    CORES_A_SHARD,
    Ask,
    Facts,
    Node,
    address_of,
    ask_for,
    connect,
    facts_here,
    nodes_of,
    probing,
    require_same,
    versions_here,
)
from quantmint.pipeline.clusters.ray.tasks import RETRIES, answers, results
from quantmint.pipeline.quantize.engines.stream.schedule import Order as WriteOrder
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.running.launchers import Cluster
from quantmint.pipeline.store.disk import disk_errors


@contextmanager
def spread_over(
    on: str | None, recipe: Recipe, *, device: str, source: Path | None, store: Path, progress: Progress
) -> Iterator[RaySpread | None]:
    """The cluster that ``--on`` names, its nodes alike; None for this process alone. `UserError` for what cannot be."""
    if on is None:
        yield None
        return
    engine = recipe.quantization.engine
    if engine != "stream":
        raise UserError(
            f"--on: found it with quantization.engine: {engine}, which works in one process, expected stream.",
            hint="`quantmint submit` runs a whole recipe on another machine.",
        )
    spread = RaySpread(address_of(on, os.environ), device, progress)
    try:
        root = store.absolute()
        shared = next(place for place in (root, *root.parents) if place.is_dir())
        with disk_errors(shared):
            spread.require_same([] if source is None else [source], [shared])
        progress.say(f"spread over {len(spread.nodes)} nodes: {spread.hardware}")
        yield spread
    finally:
        spread.release()


class RaySpread:
    """See `pipeline.stages.stage.Spread`. ``device`` is "auto", "cpu" or "cuda"."""

    def __init__(self, address: str, device: str, progress: Progress) -> None:
        self._address, self._device, self._progress = address, device, progress
        self._alike: set[tuple[str, Path]] = set()
        self._facts: dict[str, Facts] = {}
        self.nodes: tuple[Node, ...] = ()
        self._look()

    @property
    def hardware(self) -> str:
        """What computes, for people."""
        ask, found = self._ask(), Counter[str]()
        for node in self.nodes:
            if ask.slots(node):
                kind = (node.accelerator or "GPU") if ask.gpus else self._facts[node.id].processor
                found[kind] += node.gpus if ask.gpus else 1
        return ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in found.items())

    def require_same(self, folders: Sequence[Path], written: Sequence[Path] = ()) -> None:
        """Raise `UserError` for a node with other versions or ``folders``, or whose ``written`` is not seen here."""
        self._look()
        folders = [folder.resolve() for folder in folders]
        new = [n for n in self.nodes if n.id not in self._facts or any((n.id, f) not in self._alike for f in folders)]
        if not new:
            return
        gone = {node.id for node in new}
        here = facts_here(folders)
        with probing([folder.resolve() for folder in written]) as probes:
            asked = {_on(node, tasks.facts, Ask("cpu", 0, 0)).remote(folders, probes): node for node in new}
            for node, there in answers(asked):
                require_same(node.name, there, here)
                gone.discard(node.id)
                self._facts[node.id] = there
                self._alike |= {(node.id, folder) for folder in folders}
        # A node that has just gone is in Ray's table for a while.
        self.nodes = tuple(node for node in self.nodes if node.id not in gone)
        self._ask()

    def write_shards(self, order: WriteOrder) -> dict[str, float]:
        """See `pipeline.quantize.engines.stream.schedule.write_shards`; a file a task, the largest first."""
        began = time.perf_counter()
        seconds: dict[str, float] = defaultdict(float, written=0.0)
        if not order.plans:
            return seconds
        source, destination = order.source.resolve(), order.destination.resolve()
        self.require_same([source], [destination])
        ask = self._ask(most_cores=CORES_A_SHARD)
        make = _remote(tasks.write_shard, ask)
        cores = ask.cpus or None
        left = {
            make.remote(plan, order.scalars(plan), source, destination, ask.device, cores, versions_here()): plan
            for plan in sorted(order.plans, key=lambda plan: -plan.read_bytes)
        }
        for plan, (shard, name, spent) in results(left, ask, self._progress.warn):
            flush = time.perf_counter()
            if not (destination / name).exists():
                raise StageError(f"{destination / name} was written by a node of the cluster, but is not there.")
            order.commit(shard, destination / name)
            order.advance(plan.read_bytes)
            for kind, each in spent.items():
                seconds[kind] += each
            seconds["flush"] += time.perf_counter() - flush
        seconds["written"] = time.perf_counter() - began
        return seconds

    def places(self, folder: Path) -> Places:
        """Where shares of the batches are measured, for a model in ``folder``: one a GPU, or one a node."""
        self.require_same([folder])
        ask = self._ask()
        if ask.gpus:
            asked = {_on(node, tasks.free, ask).remote(ask.device): node for node in self.nodes if node.gpus}
            free = {node.id: found for node, found in answers(asked)}
        else:
            free = {node.id: self._facts[node.id].free for node in self.nodes}
        each = {
            f"{node.name} {turn}" if ask.slots(node) > 1 else node.name: free[node.id] // (1 if ask.gpus else slots)
            for node in self.nodes
            if node.id in free and (slots := ask.slots(node))
            for turn in range(slots)
        }
        together = max((ask.slots(node) for node in self.nodes if node.id in free), default=1)
        states = min((self._facts[number].free for number in free), default=0) // 4 // max(together, 1)
        return Places(each, ask, self._progress, together, states)

    def release(self) -> None:
        """Leave: the cluster ends the processes that hold GPUs and memory for us; what comes next connects again."""
        import ray

        ray.shutdown()

    def cluster(self) -> Cluster:
        """See `pipeline.stages.stage.Spread`; `UserError` where this process is on none of the cluster's nodes."""
        import ray

        if self._address.startswith("ray://"):
            raise UserError(
                f"--on: found {self._address}, through which no server is started, expected to be on a node.",
                hint="Start the run on a node of the cluster, with `--on ray`, or by `quantmint submit --ray`.",
            )
        connect(self._address)
        context = ray.get_runtime_context()
        return Cluster(str(context.gcs_address), str(ray.util.get_node_ip_address()))

    def _look(self) -> None:
        import ray

        connect(self._address)
        self.nodes = nodes_of(ray.nodes())
        self._ask()

    def _ask(self, *, most_cores: int | None = None) -> Ask:
        return ask_for(self.nodes, self._device, most_cores=most_cores)


@dataclass(frozen=True, slots=True)
class Places:
    """See `calibration.calibrate.Places`.

    ``together`` is how many shares a node measures at a time at the most, and ``states`` the bytes of host memory that
    the hidden states of each may take where nobody says.
    """

    free: Mapping[str, int]
    ask: Ask
    progress: Progress
    together: int = 1
    states: int = 0

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """See `calibration.calibrate.Places`."""
        return self.ask.device

    def measure(self, order: Order, shares: Sequence[Share]) -> Iterator[Share]:
        """A task a share, and as many at a time as Ray finds room for."""
        asked = order.activation_bytes
        order = replace(order, activation_bytes=self.states if asked is None else asked // self.together)
        task = _remote(tasks.measure, self.ask)
        left = {task.remote(order, share, self.ask.device, versions_here()): share for share in shares}
        for share, _ in results(left, self.ask, self.progress.warn):
            yield share


def _remote(function: Callable[..., Any], ask: Ask, strategy: Any = "SPREAD") -> Any:
    import ray

    return ray.remote(max_retries=RETRIES, scheduling_strategy=strategy, **ask.options())(function)


def _on(node: Node, function: Callable[..., Any], ask: Ask) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return _remote(function, ask, NodeAffinitySchedulingStrategy(node.id, soft=False))
