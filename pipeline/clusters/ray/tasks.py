"""Functions that run on a node, and generators of their results here that cancel what is left when a stage ends.

A function is imported on the node from the same installation. Ray may run the same task twice when it wrongly takes
the first process for lost. So each run writes to a file name of its own, and the driver commits one of them.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from quantmint.calibration.calibrate import Share, ShareOrder, measure_share
from quantmint.calibration.durable import fsync
from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.errors import QuantmintError, StageError, UserError, first_line, last_line
from quantmint.pipeline.clusters.ray import nodes
from quantmint.pipeline.clusters.ray.nodes import Node, TaskResources
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan
from quantmint.pipeline.quantize.engines.stream.schedule import Order, write_shards
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX, WrittenShard

T = TypeVar("T")
RETRIES = 3
"""Repetitions of a task whose process or node was lost; Ray's own default."""
_POLL_S = 2.0
_RESUME = "The same command goes on with what is missing."


def run(function: Callable[..., T], versions: Mapping[str, str] | None, *arguments: Any) -> T:
    """Call ``function`` on a node, without the secrets of the shell that started Ray.

    ``versions`` are the driver's, and None while nodes are compared: a node may have joined after that. Raises
    `UserError` when its own differ.
    """
    nodes.drop_secrets()
    if versions is not None:
        nodes.require_versions(socket.gethostname(), nodes.local_versions(), versions)
    return function(*arguments)


def write_shard(
    plan: ShardPlan,
    scales: Mapping[str, torch.Tensor],
    folders: tuple[Path, Path],
    resources: TaskResources,
) -> tuple[WrittenShard, str, Mapping[str, float]]:
    """Write one file of the checkpoint; return its record, its uncommitted name, and seconds by kind.

    ``folders`` are the source and the destination. The file is fsynced, because only this node's page cache holds it.
    Raises the errors of `write_shards`.
    """
    start, written = time.perf_counter(), []
    source, destination = folders

    def commit(shard: WrittenShard, path: Path) -> None:
        fsync(destination)
        written.append((shard, path.name))

    suffix = f".{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
    order = Order([plan], source, destination, lambda _: scales, lambda _: None, commit)
    seconds = write_shards(order, [resources.device], cores=resources.cpus or None, suffix=suffix)
    ((shard, name),) = written
    return shard, name, {**seconds, "task": time.perf_counter() - start}


def measure(order: ShareOrder, share: Share, device: str) -> None:
    """Measure a share of the calibration batches, see `calibration.calibrate.measure_share`."""
    if device == "cpu":
        torch.set_num_threads(order.threads)  # as many as the driver has: the last bit of a sum depends on it
    measure_share(order, share, device)


def results(tasks: Mapping[Any, T], resources: TaskResources, warn: Callable[[str], None]) -> Iterator[tuple[T, Any]]:
    """Yield each task's value of ``tasks`` with its result, in the order in which they finish.

    Cancels the remaining tasks when one raises, when no node is left, and when the caller stops. Raises the task's own
    error, or `StageError` for a lost cluster. ``warn`` hears of lost nodes.
    """
    import ray

    pending = dict(tasks)
    try:
        with _cluster_errors():
            names = {node.id: node.name for node in nodes.parse_nodes(ray.nodes())}
            while pending:
                _require_connection()
                ready = ray.wait(list(pending), timeout=_POLL_S)[0]
                for reference in ready:
                    part = pending.pop(reference)
                    try:
                        result = ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    yield part, result
                if not ready:
                    names = _warn_of_losses(names, resources, warn)
    finally:
        with suppress(*_connection_errors()):
            for reference in pending if ray.is_initialized() else ():  # else Ray would start a cluster to cancel them
                ray.cancel(reference, force=True)


def answers(questions: Mapping[Any, Node]) -> Iterator[tuple[Node, Any]]:
    """Yield each node of ``questions`` with its task's result, leaving out nodes that are gone.

    Raises the task's own `QuantmintError`, and `UserError` for a node on which quantmint does not run.
    """
    import ray

    lost_node = (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
    with _cluster_errors():
        for reference, node in questions.items():
            _require_connection()
            with suppress(*lost_node):
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, QuantmintError):
                        raise error.cause from None
                    message = f"{node.name}: quantmint does not run there: {last_line(error.cause)}"
                    raise UserError(message, hint=nodes.SAME_NODES_HINT) from None
                yield node, answer


@contextmanager
def _cluster_errors() -> Iterator[None]:
    """Raise Ray's errors as `StageError`, a lost connection as a transient one."""
    import ray

    try:
        yield
    except _connection_errors() as error:
        message = f"the connection to the Ray cluster broke: {first_line(error)}"
        raise StageError(message, hint=_RESUME, transient=True) from error
    except ray.exceptions.RayError as error:
        message = f"the Ray cluster gave up a task: {first_line(error)}"
        raise StageError(message, hint=f"The logs of Ray on its nodes say why. {_RESUME}") from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of Ray for a lost head or own node; its client also raises gRPC's."""
    from grpc import RpcError
    from ray import exceptions as ray

    return (ConnectionError, RpcError, ray.RpcError, ray.RaySystemError, ray.LocalRayletDiedError)


def _require_connection() -> None:
    """Raise ConnectionError for a closed connection: any call would make Ray start a cluster on this machine."""
    import ray

    if not ray.is_initialized():
        raise ConnectionError("it was closed")


def _warn_of_losses(names: Mapping[str, str], resources: TaskResources, warn: Callable[[str], None]) -> dict[str, str]:
    """Warn of nodes that left, and return the names of the present nodes by node id.

    ``names`` are the nodes known before, by id. Raises `StageError` when no node has the resources.
    """
    import ray

    there = nodes.parse_nodes(ray.nodes())
    alive = {node.id: node.name for node in there}
    for identifier, name in names.items():
        if identifier not in alive:
            warn(f"lost the node {name}; its tasks run again elsewhere")
    if not any(resources.slots(node) for node in there):
        message = "no node of the Ray cluster is left to work on."
        raise StageError(message, hint=f"Wait for one. {_RESUME}", transient=True)
    return alive
