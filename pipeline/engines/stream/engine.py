"""A whole checkpoint, file by file, resumable at the first file that is not in the manifest."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.digest import COMPANION_FILES
from pipeline.engines.stream.kernels import fp8_scale
from pipeline.engines.stream.plan import STATIC_ROLES, ShardPlan
from pipeline.engines.stream.shard import PARTIAL_SUFFIX, WrittenShard, write_shard
from pipeline.errors import StageError
from pipeline.formats.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from pipeline.formats.layout import Choice, layout
from pipeline.store.disk import write_atomic

if TYPE_CHECKING:
    import torch

_OURS = ("config.json", INDEX_NAME)


def write_checkpoint(
    source: Checkpoint,
    plans: tuple[ShardPlan, ...],
    choice: Choice,
    ranges: Mapping[str, float],
    destination: Path,
    *,
    checkpoint_format: str,
    manifest: Path,
    device: str = "cpu",
    with_code: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[WrittenShard, ...]:
    """Write the quantized checkpoint into ``destination``, going on where an earlier attempt stopped.

    ``ranges`` holds the largest magnitude behind each static scale, by the scale's name. ``manifest`` (JSON lines)
    lists the files that are committed; those are skipped. Returns all weight files.
    Raises `StageError` when the disk is full or a file cannot be read.
    """
    destination.mkdir(parents=True, exist_ok=True)
    done = _read_manifest(manifest, destination)
    for stale in destination.glob(f"*{PARTIAL_SUFFIX}"):
        stale.unlink()
    written: list[WrittenShard] = []
    try:
        for plan in plans:
            if plan.name in done:
                advance(plan.read_bytes)
            else:
                scales = _static_scales(plan, ranges)
                done[plan.name] = write_shard(plan, source.folder, destination, scales, device=device, advance=advance)
                _append_manifest(manifest, done[plan.name])
            written.append(done[plan.name])
        _write_companions(source, destination, with_code=with_code)
        _write_config(source, choice, destination, checkpoint_format)
        if plans[0].name != SINGLE_NAME or (source.folder / INDEX_NAME).is_file():
            _write_index(plans, destination)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(destination).free
            raise StageError(
                f"{destination}: the disk is full: {free:,} bytes are free of {sum(p.nbytes for p in plans):,} in all.",
                hint="Free space and run the same command: finished files are kept.",
            ) from error
        raise StageError(f"{destination}: {error}.") from error
    return tuple(written)


def _static_scales(plan: ShardPlan, ranges: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """The scales of one file that no weight decides, rounded to the dtype that they are stored in."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16}
    return {
        stored.name: fp8_scale(torch.tensor(ranges[stored.name], dtype=dtypes[stored.dtype]))
        for stored in plan.deferred
        if stored.role in STATIC_ROLES
    }


def _read_manifest(manifest: Path, destination: Path) -> dict[str, WrittenShard]:
    done: dict[str, WrittenShard] = {}
    if not manifest.is_file():
        return done
    for line in manifest.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = WrittenShard(**json.loads(line))
        except (ValueError, TypeError):
            continue  # the line that was being written when the process died
        path = destination / entry.name
        if path.is_file() and path.stat().st_size == entry.size:
            done[entry.name] = entry
    return done


def _append_manifest(manifest: Path, entry: WrittenShard) -> None:
    with manifest.open("a", encoding="utf-8") as stream:
        # A line that was cut short by a crash must not swallow this one.
        stream.write("\n" if stream.tell() else "")
        stream.write(json.dumps(asdict(entry)))
        stream.flush()
        os.fsync(stream.fileno())


def _write_companions(source: Checkpoint, destination: Path, *, with_code: bool) -> None:
    # Code is copied only for a recipe that trusts it.
    patterns = (*COMPANION_FILES, "*.py") if with_code else COMPANION_FILES
    for path in sorted({path for pattern in patterns for path in source.folder.glob(pattern)}):
        if path.is_file() and path.name not in _OURS:
            _write_whole(destination / path.name, path.read_bytes())


def _write_config(source: Checkpoint, choice: Choice, destination: Path, checkpoint_format: str) -> None:
    declared = layout(checkpoint_format).quantization_config(choice)
    config: dict[str, Any] = {**source.config, "quantization_config": declared}
    _write_whole(destination / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _write_index(plans: tuple[ShardPlan, ...], destination: Path) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for plan in plans:
        stored = [out for step in plan.steps for out in step.outputs]
        stored += [out for out in plan.deferred if out.role in ("k_scale", "v_scale")]
        weight_map.update({out.name: plan.name for out in stored})
        total += sum(out.nbytes for out in stored)
    index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_whole(destination / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())


def _write_whole(path: Path, data: bytes) -> None:
    write_atomic(path, data, temporary=path.with_name(path.name + PARTIAL_SUFFIX))
