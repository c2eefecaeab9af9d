"""A whole checkpoint, several files at a time, resumable at the first file that is not in the manifest.

Its static scales come from measured ranges by `scale_ranges`, which every engine that writes any takes them from, so
that they are the same numbers.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from quantmint.calibration.durable import fsync
from quantmint.calibration.lazy import torch
from quantmint.calibration.ranges import Ranges
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.digest import companions
from quantmint.pipeline.quantize.engines.algorithms import RECIPE, record
from quantmint.pipeline.quantize.engines.stream.plan import STATIC_ROLES, ShardPlan
from quantmint.pipeline.quantize.engines.stream.schedule import Order, WriteShards, write_shards
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX, WrittenShard
from quantmint.pipeline.quantize.formats.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, torch_dtype
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.formats.layout import layout
from quantmint.pipeline.quantize.inspection.numbers import Error
from quantmint.pipeline.quantize.schemes.scales import fp8_scale, global_scale
from quantmint.pipeline.store.disk import write_atomic


def scale_ranges(ranges: Ranges, choice: Choice, checkpoint_format: str) -> dict[str, torch.Tensor]:
    """Return the largest magnitudes behind each static scale, by the name of the tensor that holds the scale.

    These are inputs of modules with static activations, and K and V of every attention layer where the cache is FP8:
    float32 [1], or [H_kv] with one scale for each KV head. Raises `UserError` for a module whose inputs were not
    measured.
    """
    found: dict[str, torch.Tensor] = {}
    for module, name in choice.schemes.items():
        if scheme(name).needs_ranges:
            if module not in ranges.inputs:
                raise UserError(
                    f"quantization.scheme: found {name} for {module}, which needs the range of its inputs, and "
                    "calibration did not measure it: the model does not run this module on text.",
                    hint="Name it in `exclude`, or take a scheme without static scales, such as ptpc_fp8.",
                )
            found[f"{module}.{scheme(name).input_scale_role}"] = ranges.inputs[module].reshape(1)
    form = layout(checkpoint_format)
    for attention, keys in ranges.keys.items() if choice.kv_cache else ():
        for name, amax in zip(form.kv_scale_names(attention), (keys, ranges.values[attention]), strict=True):
            found[name] = amax if choice.kv_per_head else amax.max().reshape(1)
    return found


@dataclass(frozen=True, slots=True)
class Written:
    """A written checkpoint: its weight files, and the seconds spent.

    ``seconds`` has "written" and "durable", from the start of the call, the latter including the flush to the disk, and
    for each kind of work (read, compute, write, hash, wait, flush) the sum over threads.
    """

    shards: tuple[WrittenShard, ...]
    seconds: Mapping[str, float]

    @property
    def errors(self) -> dict[str, Error]:
        """Return the rounding error of each quantized module."""
        return {module: error for shard in self.shards for module, error in shard.errors.items()}


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The contents of a checkpoint that is made from ``source``.

    ``plans`` lay out the output files, ``choice`` gives each module's scheme. ``ranges`` are the largest magnitudes
    behind static scales, by the scale's name in the checkpoint. ``with_code`` copies the source's Python files too.
    ``algorithms`` ("gptq") are those that made weights of the plans before; config.json or the recipe file beside it
    names them.
    """

    source: Checkpoint
    plans: tuple[ShardPlan, ...]
    choice: Choice
    ranges: Mapping[str, torch.Tensor | float]
    checkpoint_format: str
    with_code: bool = False
    algorithms: Sequence[str] = ()


def write_checkpoint(
    contents: CheckpointPlan,
    destination: Path,
    *,
    manifest: Path,
    devices: Sequence[str] = ("cpu",),
    advance: Callable[[int], None] = lambda _: None,
    write: WriteShards | None = None,
) -> Written:
    """Write the quantized checkpoint into ``destination``, resuming where an earlier attempt stopped.

    ``manifest`` (JSON lines) lists the files that are committed; those are skipped. Files are spread over ``devices``,
    or made elsewhere by ``write``, and committed here in either case; ``advance`` gets the bytes that were read. Raises
    `StageError` when the disk is full, a file cannot be read or a weight is not finite.
    """
    source, plans = contents.source, contents.plans
    begin = time.perf_counter()
    destination.mkdir(parents=True, exist_ok=True)
    done = _read_manifest(manifest, destination)
    _forget_partial(destination)
    try:
        for plan in plans:
            if plan.name in done:
                advance(plan.read_bytes)
        missing = [plan for plan in plans if plan.name not in done]

        def commit(shard: WrittenShard, path: Path) -> None:
            if path.exists():  # else an earlier try came as far as the manifest
                path.replace(destination / shard.name)
            fsync(destination)
            _append_manifest(manifest, shard)
            done[shard.name] = shard

        order = Order(
            missing, source.folder, destination, lambda p: _static_scales(p, contents.ranges), advance, commit
        )
        seconds = write_shards(order, devices) if write is None else write(order)
        _forget_partial(destination)  # of attempts elsewhere that were taken for lost
        for copy, path in companions(source.folder, destination, with_code=contents.with_code).items():
            _write_whole(copy, path.read_bytes())
        _write_config(contents, destination)
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
    seconds["durable"] = time.perf_counter() - begin
    return Written(tuple(done[plan.name] for plan in plans), dict(seconds))


def _forget_partial(destination: Path) -> None:
    for stale in destination.glob(f"*{PARTIAL_SUFFIX}"):
        stale.unlink(missing_ok=True)  # an attempt that fails removes its own


def static_scale(role: str, largest: torch.Tensor, stored: torch.dtype, model: torch.dtype) -> torch.Tensor:
    """Return the static scale for a ``largest`` magnitude, in the dtype ``stored``.

    For an FP8 scheme or cache it is ``largest`` / 448. For NVFP4's ``input_global_scale`` it is 448 * 6 / ``largest``,
    computed in ``model``, the model's dtype.
    """
    if role == "input_global_scale":
        return global_scale(largest.to(model)).to(stored)
    return fp8_scale(largest.to(stored))


def _static_scales(plan: ShardPlan, ranges: Mapping[str, torch.Tensor | float]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that no kernel makes, by name: static scales in stored dtype, and weights' shapes.

    Raises `StageError` where the number of measured ranges is not that of the stored scales.
    """
    scales: dict[str, torch.Tensor] = {}
    origins = {step.name: step.origin for step in plan.steps}
    for stored in plan.deferred:
        module = stored.name.removesuffix(f".{stored.role}")
        if stored.role == "weight_shape":
            scales[stored.name] = torch.tensor(origins[module].shape)
        elif stored.role in STATIC_ROLES:
            largest = torch.as_tensor(ranges[stored.name])
            model = origins[module].dtype if module in origins else stored.dtype
            scale = static_scale(stored.role, largest, torch_dtype(stored.dtype), torch_dtype(model))
            if scale.numel() != prod(stored.shape):
                raise StageError(f"{stored.name}: {scale.numel()} ranges were measured, expected {list(stored.shape)}.")
            scales[stored.name] = scale.reshape(stored.shape)
    return scales


def _read_manifest(manifest: Path, destination: Path) -> dict[str, WrittenShard]:
    done: dict[str, WrittenShard] = {}
    if not manifest.is_file():
        return done
    for line in manifest.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            errors = {module: Error(**sums) for module, sums in entry.pop("errors").items()}
            shard = WrittenShard(**entry, errors=errors)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # the line that was being written when the process died
        path = destination / shard.name
        if path.is_file() and path.stat().st_size == shard.size:
            done[shard.name] = shard
    return done


def _append_manifest(manifest: Path, entry: WrittenShard) -> None:
    with manifest.open("a", encoding="utf-8") as stream:
        # A line that was cut short by a crash must not swallow this one.
        stream.write("\n" if stream.tell() else "")
        stream.write(json.dumps(asdict(entry)))
        stream.flush()
        os.fsync(stream.fileno())


def _write_config(contents: CheckpointPlan, destination: Path) -> None:
    declared = layout(contents.checkpoint_format).quantization_config(contents.choice)
    if contents.algorithms:
        names, text = record(contents.algorithms, contents.checkpoint_format)
        if text is None:
            declared = {**declared, "algo_config": [{"name": name} for name in names]}
        else:
            _write_whole(destination / RECIPE, text.encode())
    config: dict[str, Any] = {**contents.source.config, "quantization_config": declared}
    _write_whole(destination / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _write_index(plans: tuple[ShardPlan, ...], destination: Path) -> None:
    stored = {out.name: (plan.name, out.nbytes) for plan in plans for out in plan.stored}
    index: Mapping[str, Any] = {
        "metadata": {"total_size": sum(size for _, size in stored.values())},
        "weight_map": {name: shard for name, (shard, _) in sorted(stored.items())},
    }
    _write_whole(destination / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())


def _write_whole(path: Path, data: bytes) -> None:
    write_atomic(path, data, temporary=path.with_name(path.name + PARTIAL_SUFFIX))
