"""The parts of a stage as Ray tasks: shards of a checkpoint, shares of the calibration batches.

Ray picks the nodes and repeats the tasks of a lost one. Files go through the filesystem that the nodes share, plans
and results through Ray. This process alone commits, to the same manifest as a run without a cluster.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from quantmint.calibration.calibrate import Share, ShareOrder
from quantmint.calibration.room import free_bytes
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.clusters.ray import nodes, tasks
from quantmint.pipeline.clusters.ray.nodes import Node, NodeFacts, TaskResources, local_versions
from quantmint.pipeline.clusters.ray.tasks import answers, results
from quantmint.pipeline.quantize.engines.stream.schedule import Order as WriteOrder
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.running.launchers import Cluster
from quantmint.pipeline.store.disk import disk_errors


@contextmanager
def open_spread(
    on: str | None, recipe: Recipe, *, device: str, source: Path | None, store: Path, progress: Progress
) -> Iterator[RaySpread | None]:
    """Connect to the cluster of the option ``--on`` for the block; yield None without the option.

    Raises `UserError` for an engine that runs in one process, and for nodes that differ from this machine.
    """
    if on is None:
        yield None
        return
    engine = recipe.quantization.engine
    if engine != "stream":
        message = f"--on: the engine {engine} runs in one process, expected quantization.engine: stream."
        raise UserError(message, hint="`quantmint submit` runs a whole recipe on another machine.")
    spread = RaySpread(nodes.ray_address(on, os.environ), device, progress)
    try:
        root = store.absolute()
        shared = next(folder for folder in (root, *root.parents) if folder.is_dir())
        with disk_errors(shared):
            spread.require_same([] if source is None else [source], [shared])
        progress.say(f"spread over {len(spread.nodes)} nodes: {spread.hardware}")
        yield spread
    finally:
        spread.release()


class RaySpread:
    """A connected cluster, see `pipeline.stages.stage.Spread`. ``device`` is "auto", "cpu" or "cuda"."""

    def __init__(self, address: str, device: str, progress: Progress) -> None:
        self._address, self._device, self._progress = address, device, progress
        self._compared: set[tuple[str, Path]] = set()  # node id, folder
        self._facts: dict[str, NodeFacts] = {}  # by node id
        self.nodes: tuple[Node, ...] = ()
        self._refresh()

    @property
    def hardware(self) -> str:
        """Return the processors or GPUs of the nodes as text, such as ``16 x AMD-Instinct-MI300X-OAM``."""
        resources, counts = self._resources(), Counter[str]()
        for node in self.nodes:
            if resources.slots(node):
                kind = (node.accelerator or "GPU") if resources.gpus else self._facts[node.id].processor
                counts[kind] += node.gpus if resources.gpus else 1
        return ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in counts.items())

    def require_same(self, folders: Sequence[Path], written: Sequence[Path] = ()) -> None:
        """Raise `UserError` for a node with other library versions or other files in ``folders`` than this machine.

        Also for a node that does not see a file just written to one of the folders ``written``. Nodes that are gone are
        dropped from ``nodes``.
        """
        self._refresh()
        folders = [folder.resolve() for folder in folders]
        pairs = {node.id: {(node.id, folder) for folder in folders} for node in self.nodes}
        new = [node for node in self.nodes if node.id not in self._facts or pairs[node.id] - self._compared]
        if not new:
            return
        here = nodes.local_facts(folders)
        with nodes.probe_files([folder.resolve() for folder in written]) as probes:
            resources = TaskResources("cpu", 0, 0)
            for node, there in answers(_ask_nodes(new, resources, nodes.local_facts, folders, probes)):
                nodes.require_same(node.name, there, here)
                new.remove(node)
                self._facts[node.id] = there
                self._compared |= pairs[node.id]
        # Ray lists a node for a while after it is gone.
        self.nodes = tuple(node for node in self.nodes if node not in new)
        self._resources()

    def write_shards(self, order: WriteOrder) -> dict[str, float]:
        """Write the shards, one task each, the largest first; return seconds by kind of work.

        See `engines.stream.schedule.write_shards`. Raises `StageError` for a written file that this machine does not
        see.
        """
        start = time.perf_counter()
        seconds: dict[str, float] = defaultdict(float, written=0.0)
        if not order.plans:
            return seconds
        source, destination = order.source.resolve(), order.destination.resolve()
        self.require_same([source], [destination])
        resources = self._resources(max_cores=nodes.CORES_PER_SHARD)
        write = _remote(tasks.write_shard, resources, local_versions())
        pending = {
            write(plan, order.scalars(plan), (source, destination), resources): plan
            for plan in sorted(order.plans, key=lambda plan: -plan.read_bytes)
        }
        for plan, (shard, name, spent) in results(pending, resources, self._progress.warn):
            flush = time.perf_counter()
            if not (destination / name).exists():
                raise StageError(f"{destination / name} was written by a node of the cluster, but is not there.")
            order.commit(shard, destination / name)
            order.advance(plan.read_bytes)
            for kind, duration in spent.items():
                seconds[kind] += duration
            seconds["flush"] += time.perf_counter() - flush
        seconds["written"] = time.perf_counter() - start
        return seconds

    def places(self, folder: Path) -> RayWorkers:
        """Return the GPUs, or without GPUs the nodes, that measure calibration shares of the model in ``folder``."""
        self.require_same([folder])
        resources = self._resources()
        free = {node.id: self._facts[node.id].free for node in self.nodes if resources.slots(node)}
        host_memory = min(free.values(), default=0)
        if resources.gpus:
            gpu_nodes = [node for node in self.nodes if node.gpus]
            questions = _ask_nodes(gpu_nodes, resources, free_bytes, resources.device)
            free = {node.id: memory for node, memory in answers(questions)}
        slots = {node: resources.slots(node) for node in self.nodes if node.id in free}
        workers = {
            f"{node.name} {slot}" if count > 1 else node.name: free[node.id] // (1 if resources.gpus else count)
            for node, count in slots.items()
            for slot in range(count)
        }
        together = max(slots.values(), default=1)
        return RayWorkers(workers, resources, self._progress, together, host_memory // 4 // together)

    def release(self) -> None:
        """Disconnect: the cluster ends our worker processes and frees their memory. A later call connects again."""
        import ray

        ray.shutdown()

    def cluster(self) -> Cluster:
        """Return the cluster to serve on.

        Raises `UserError` for a ``ray://`` address, through which this process is on none of the nodes.
        """
        import ray

        if self._address.startswith("ray://"):
            message = f"--on: no server can be started through {self._address}."
            hint = "Start the run on a node of the cluster, with `--on ray`, or by `quantmint submit --ray`."
            raise UserError(message, hint=hint)
        nodes.connect(self._address)
        context = ray.get_runtime_context()
        return Cluster(str(context.gcs_address), str(ray.util.get_node_ip_address()))

    def _refresh(self) -> None:
        import ray

        nodes.connect(self._address)
        self.nodes = nodes.parse_nodes(ray.nodes())
        self._resources()

    def _resources(self, *, max_cores: int | None = None) -> TaskResources:
        return nodes.task_resources(self.nodes, self._device, max_cores=max_cores)


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """The slots for calibration shares with their free bytes, see `calibration.calibrate.Places`.

    ``together`` is the largest number of slots on one node. ``states`` is the default limit, in bytes of host memory,
    of one share's hidden states.
    """

    free: Mapping[str, int]
    resources: TaskResources
    progress: Progress
    together: int = 1
    states: int = 0

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Return PyTorch's name of each slot's device."""
        return self.resources.device

    def measure(self, order: ShareOrder, shares: Sequence[Share]) -> Iterator[Share]:
        """Measure each share in a task of its own; yield the shares as they finish."""
        limit = order.activation_bytes
        order = replace(order, activation_bytes=self.states if limit is None else limit // self.together)
        measure = _remote(tasks.measure, self.resources, local_versions())
        pending = {measure(order, share, self.resources.device): share for share in shares}
        for share, _ in results(pending, self.resources, self.progress.warn):
            yield share


def _remote(
    function: Callable[..., Any],
    resources: TaskResources,
    versions: Mapping[str, str] | None = None,
    strategy: Any = "SPREAD",
) -> Callable[..., Any]:
    """Return a function that starts ``function`` as a task and returns Ray's reference, see `tasks.run`."""
    import ray

    options = {"name": function.__name__, "max_retries": tasks.RETRIES, "scheduling_strategy": strategy}
    return partial(ray.remote(**options, **resources.options())(tasks.run).remote, function, versions)


def _ask_nodes(
    on: Sequence[Node], resources: TaskResources, function: Callable[..., Any], *arguments: Any
) -> dict[Any, Node]:
    """Start ``function`` with ``arguments`` on each node; return the nodes by Ray's references to the results."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Affinity

    return {_remote(function, resources, None, Affinity(node.id, soft=False))(*arguments): node for node in on}
