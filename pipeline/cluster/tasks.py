"""What runs on a node: plain functions, imported there from the same installation.

A function may run twice at a time for the same part, where its first process was taken for lost and still works: each
writes under a name of its own, and whoever asked takes one of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.connection import forget_secrets
from pipeline.cluster.sameness import Facts, facts_here, require_versions

if TYPE_CHECKING:
    import torch

    from calibration.shares import Order, Share
    from pipeline.engines.stream.plan import ShardPlan
    from pipeline.engines.stream.shard import WrittenShard


def facts(folders: Sequence[Path], probes: Sequence[Path], answer: str) -> Facts:
    """See `sameness`."""
    forget_secrets()
    return facts_here(folders, probes, answer)


def free(device: str) -> int:
    """Bytes that are free on the device that this task was given."""
    from calibration.room import free_bytes

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
    from pipeline.engines.stream.schedule import write_shards
    from pipeline.engines.stream.shard import PARTIAL_SUFFIX
    from pipeline.store.disk import fsync

    forget_secrets()
    require_versions(versions)
    began, made = time.perf_counter(), []

    def commit(shard: WrittenShard, path: Path) -> None:
        fsync(path)
        fsync(destination)
        made.append((shard, path.name))

    suffix = f".{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
    seconds = write_shards(
        [plan], source, destination, lambda _: scales, [device], lambda _: None, commit, cores=cores, suffix=suffix
    )
    (shard, name) = made[0]
    return shard, name, {**seconds, "task": time.perf_counter() - began}


def measure(order: Order, share: Share, device: str, versions: Mapping[str, str]) -> None:
    """Measure a share of the calibration batches, see `calibration.shares.measure_share`."""
    import torch

    from calibration.shares import measure_share

    forget_secrets()
    require_versions(versions)
    if device == "cpu":
        torch.set_num_threads(order.threads)  # those of the process that asks, so that the bits are its own
    measure_share(order, share, device, secrets.token_hex(4))
