"""Ranges of a model of any size, on one device or several.

    outcome = calibrate(folder, batches, Observation(), devices=["cuda:0", "cuda:1"], work=scratch)
    outcome.ranges.save(path)

Where the model fits the devices it is loaded whole (`calibration.resident`), else layer by layer
(`calibration.layers`). The same batches give the same ranges to the last bit, whichever it is, on however many devices
of a kind, and in whatever order.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from calibration.activations import Activations
from calibration.calls import layer_names
from calibration.coverage import sentences
from calibration.errors import CalibrationError, NotReplayableError
from calibration.layers import Found, run_layers
from calibration.measurement import Measurement, merged
from calibration.names import experts_on_disk, sources
from calibration.observe import ranges_of, require_sound
from calibration.observers import Observation
from calibration.ranges import Ranges
from calibration.replica import Replica, replica
from calibration.resident import run_resident
from calibration.room import Decision, Mode, Need, decide, forward_bytes, free_bytes
from calibration.weights import held, nbytes, without_bars

if TYPE_CHECKING:
    import torch

COMMIT_SECONDS = 60.0
"""Work in layer mode after which it is made resumable."""


class Watcher(Protocol):
    """Who is told how far it is."""

    def bar(self, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """A bar over ``total`` units; the value is called with each advance."""
        ...

    def say(self, message: str) -> None:
        """One line about what goes on now."""
        ...

    def warn(self, message: str) -> None:
        """One line that must not be missed."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ranges, and how they were taken; ``warnings`` are sentences about experts that few tokens reached."""

    ranges: Ranges
    decision: Decision
    warnings: tuple[str, ...]


def calibrate(
    folder: Path,
    batches: Sequence[torch.Tensor],
    observation: Observation,
    *,
    devices: Sequence[str],
    work: Path,
    watcher: Watcher,
    mode: Mode = "auto",
    activation_bytes: int | None = None,
    trust_remote_code: bool = False,
) -> Outcome:
    """Measure a model on batches of tokens.

    Args:
        folder: the 16-bit model.
        batches: int64 token ids of [batch, sequence], no padding; how they are composed decides the last bit.
        observation: what is measured, and how.
        devices: a copy of the model, or of its layer, for each; the copies share the batches.
        work: a folder for what an interrupted run in layer mode is gone on with; removed at the end.
        watcher: who is told.
        mode: "auto" takes resident mode where the model fits.
        activation_bytes: host memory for hidden states in layer mode, the rest of which is spilled to ``work``; None
            takes a quarter of what is free.
        trust_remote_code: run the model's own Python code.

    Raises:
        CalibrationError: the model cannot be measured; the message says why, and what to do instead.
    """
    import torch

    try:
        with without_bars():
            replicas = [replica(folder, device, trust_remote_code=trust_remote_code) for device in devices]
            need, obstacle = _need(replicas[0], batches)
            decision = decide(mode, need, devices, {device: free_bytes(device) for device in devices}, obstacle)
            watcher.say(f"{decision.mode} mode on {', '.join(devices)}: {decision.reason}")
            if decision.mode == "resident":
                found = _resident(replicas, batches, observation, watcher)
            else:
                found = _by_layers(replicas, batches, observation, watcher, work, activation_bytes, need)
    except NotReplayableError as error:
        raise CalibrationError(
            f"{folder}: its layers cannot be run one at a time: {error}; "
            "take calibration.mode: resident on a device that holds it, or quantization.engine: llmcompressor"
        ) from error
    except torch.OutOfMemoryError as error:
        raise CalibrationError(
            f"out of memory: take a smaller calibration.batch_size, or calibration.mode: layer: {error}"
        ) from error
    shutil.rmtree(work, ignore_errors=True)
    warnings = _warnings(replicas[0], found, observation)
    for sentence in warnings:
        watcher.warn(sentence)
    return Outcome(ranges_of(replicas[0], found.magnitudes), decision, warnings)


def _need(first: Replica, batches: Sequence[torch.Tensor]) -> tuple[Need, str | None]:
    """What a copy takes, and why its layers cannot be run one at a time; None where they can."""
    reason: str | None = None
    largest = 0
    try:
        layers = layer_names(first.model, first.attention.values())
        largest = max(nbytes(first.model, held(first.model, name)) for name in layers)
    except NotReplayableError as error:
        reason = str(error)
    batch, length = (max(sizes) for sizes in zip(*(batch.shape for batch in batches), strict=True))
    return Need(first.nbytes, largest, forward_bytes(first.model.config.get_text_config(), batch, length)), reason


def _resident(
    replicas: Sequence[Replica], batches: Sequence[torch.Tensor], observation: Observation, watcher: Watcher
) -> Found:
    def run(turn: int, advance: Callable[[int], None]) -> Measurement:
        replicas[turn].weights.load(replicas[turn].body)
        measurement = Measurement(observation)
        run_resident(replicas[turn], batches[turn :: len(replicas)], measurement, advance)
        return measurement

    with (
        watcher.bar(sum(batch.shape[0] for batch in batches), "samples") as advance,
        ThreadPoolExecutor(len(replicas)) as pool,
    ):
        told = _one_at_a_time(advance)
        whole = merged(list(pool.map(lambda turn: run(turn, told), range(len(replicas)))))
    found = Found(whole.finish(), whole.starved(), whole.routed_only)
    require_sound(replicas[0], found.magnitudes)
    return found


def _by_layers(
    replicas: Sequence[Replica],
    batches: Sequence[torch.Tensor],
    observation: Observation,
    watcher: Watcher,
    work: Path,
    activation_bytes: int | None,
    need: Need,
) -> Found:
    import torch

    config = replicas[0].model.config.get_text_config()
    width = config.hidden_size * torch.finfo(replicas[0].model.dtype).bits // 8
    states = sum(batch.numel() for batch in batches) * width
    gpus = [one.device for one in replicas if not one.device.startswith("cpu")]
    # A GPU keeps the states of its batches beside two layers and a forward, and leaves half of the rest free.
    room = min((free_bytes(device) - 2 * need.layer - need.forward for device in gpus), default=0)
    on_device = bool(gpus) and states <= len(gpus) * room // 2
    budget = states if on_device else activation_bytes if activation_bytes is not None else free_bytes("cpu") // 4
    layers = len(layer_names(replicas[0].model, replicas[0].attention.values()))
    with watcher.bar(layers * sum(batch.shape[0] for batch in batches), "layer samples") as advance:
        return run_layers(
            replicas,
            batches,
            observation,
            Activations(work, budget, on_device=on_device),
            advance=_one_at_a_time(advance),
            commit_seconds=COMMIT_SECONDS,
        )


def _one_at_a_time(advance: Callable[[int], None]) -> Callable[[int], None]:
    lock = threading.Lock()

    def told(count: int) -> None:
        with lock:
            advance(count)

    return told


def _warnings(first: Replica, found: Found, observation: Observation) -> tuple[str, ...]:
    named = experts_on_disk(sources(first.model, first.owned))
    starved = {named.get(expert, expert): tokens for expert, tokens in found.starved.items()}
    layers = sorted({named.get(expert, expert).rpartition(".")[0] for expert in found.routed_only})
    only = tuple(f"{layer}: only the tokens that the router sends could be counted" for layer in layers)
    return (*only, *sentences(starved, observation.min_expert_tokens))
