"""Tasks: what runs on a node, and their results here as they come, with nothing left running where one ends a stage.

What runs on a node are plain functions, imported there from the same installation. One may run twice at a time for the
same part, where its first process was taken for lost and still works: each writes under a name of its own, and whoever
asked takes one of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from quantmint.calibration.calibrate import Order as ShareOrder
from quantmint.calibration.calibrate import Share, measure_share
from quantmint.calibration.durable import fsync
from quantmint.calibration.lazy import torch
from quantmint.calibration.room import free_bytes
from quantmint.pipeline.base.errors import QuantmintError, StageError, UserError, first_line, last_line
from quantmint.pipeline.clusters.ray.nodes import (
    HINT,
    Ask,
    Facts,
    Node,
    facts_here,
    forget_secrets,
    nodes_of,
    require_versions,
)
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan
from quantmint.pipeline.quantize.engines.stream.schedule import Order, write_shards
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX, WrittenShard

T = TypeVar("T")
RETRIES = 3
"""How often Ray does a task again whose process or node was lost: its own default."""
_LOOK_S = 2.0
_LOGS = "The logs of Ray on its nodes say why; the same command goes on with what is missing."


def facts(folders: Sequence[Path], probes: Sequence[Path]) -> Facts:
    """See `nodes`."""
    forget_secrets()
    return facts_here(folders, probes)


def free(device: str) -> int:
    """Bytes that are free on the device that this task was given."""
    forget_secrets()
    return free_bytes(device)


def write_shard(
    plan: ShardPlan,
    scales: Mapping[str, torch.Tensor],
    source: Path,
    destination: Path,
    device: str,
    cores: int | None,
    versions: Mapping[str, str],
) -> tuple[WrittenShard, str, Mapping[str, float]]:
    """Make one file; its facts, the name that it has in ``destination`` until it is committed, and seconds by kind.

    ``versions`` are those of whoever asks: this node may have joined after the others were asked. The file is on the
    disk for good: only this machine's page cache knows what is not. Raises what `write_shards` does.
    """
    forget_secrets()
    require_versions(versions)
    began, made = time.perf_counter(), []

    def commit(shard: WrittenShard, path: Path) -> None:
        fsync(destination)
        made.append((shard, path.name))

    suffix = f".{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
    order = Order([plan], source, destination, lambda _: scales, lambda _: None, commit)
    seconds = write_shards(order, [device], cores=cores, suffix=suffix)
    (shard, name) = made[0]
    return shard, name, {**seconds, "task": time.perf_counter() - began}


def measure(order: ShareOrder, share: Share, device: str, versions: Mapping[str, str]) -> None:
    """Measure a share of the calibration batches, see `calibration.calibrate.measure_share`."""
    forget_secrets()
    require_versions(versions)
    if device == "cpu":
        torch.set_num_threads(order.threads)  # those of the process that asks, so that the bits are its own
    measure_share(order, share, device)


def results(tasks: Mapping[Any, T], ask: Ask, say: Callable[[str], None]) -> Iterator[tuple[T, Any]]:
    """What each task returns with what it was for, as they finish; what raises, or no node left, ends the others."""
    import ray

    left = dict(tasks)
    try:
        with connected():
            known = {node.id: node.name for node in nodes_of(ray.nodes())}
            while left:
                _require_connection()
                ready = ray.wait(list(left), timeout=_LOOK_S)[0]
                for reference in ready:
                    what = left.pop(reference)
                    try:
                        made = ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    yield what, made
                if not ready:
                    known = _told_of_losses(known, ask, say)
    finally:
        with suppress(*_lost()):
            for reference in left if ray.is_initialized() else ():  # Ray would start a cluster here to end them
                ray.cancel(reference, force=True)


def answers(questions: Mapping[Any, Node]) -> Iterator[tuple[Node, Any]]:
    """What each node that is not gone answers; raises what it raised, `UserError` where nothing of ours runs."""
    import ray

    gone = (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
    with connected():
        for reference, node in questions.items():
            _require_connection()
            try:
                answer = ray.get(reference)
            except gone:
                continue
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, QuantmintError):
                    raise error.cause from None
                raise UserError(
                    f"{node.name}: quantmint does not run there: {last_line(error.cause)}", hint=HINT
                ) from None
            yield node, answer


@contextmanager
def connected() -> Iterator[None]:
    """Word as `StageError` that the cluster was lost in the block, or gave up."""
    import ray

    try:
        yield
    except _lost() as error:
        raise StageError(
            f"the connection to the Ray cluster broke: {first_line(error)}",
            hint="The same command goes on with what is missing.",
            transient=True,
        ) from error
    except ray.exceptions.RayError as error:
        raise StageError(f"the Ray cluster gave up a part: {first_line(error)}", hint=_LOGS) from error


def _lost() -> tuple[type[Exception], ...]:
    """What Ray raises where the head is gone, or the node that we are on; its client raises some of gRPC's as well."""
    import grpc
    from ray import exceptions

    return (
        ConnectionError,
        grpc.RpcError,
        exceptions.RpcError,
        exceptions.RaySystemError,
        exceptions.LocalRayletDiedError,
    )


def _require_connection() -> None:
    import ray

    if not ray.is_initialized():  # Ray would start a cluster here to ask it
        raise ConnectionError("it was closed")


def _told_of_losses(known: Mapping[str, str], ask: Ask, say: Callable[[str], None]) -> dict[str, str]:
    import ray

    nodes = nodes_of(ray.nodes())
    alive = {node.id: node.name for node in nodes}
    for number, name in known.items():
        if number not in alive:
            say(f"lost: {name}; what it was at is done again elsewhere")
    if not any(ask.slots(node) for node in nodes):
        raise StageError(
            "no node of the Ray cluster is left to work on.",
            hint="When there is one again, the same command goes on with what is missing.",
            transient=True,
        )
    return alive
