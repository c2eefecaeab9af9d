"""Ranges of a model of any size, on one device or several, of this machine or of others that see the same files.

Layer by layer (`calibration.layers`), or with the whole model loaded (`calibration.ranges`) where its layers cannot be
run one at a time or the hidden states between them are larger. The same batches give the same ranges to the last bit,
whichever it is, on however many devices of a kind, and in whatever order: summaries are joined before anything follows
from them, by operations that no order can change.

Other machines measure shares of the batches, in any order, again where one was lost. A share that is finished is a file
with its final name; in layer mode one that was lost goes on at the last layer that was committed.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

from quantmint.calibration.activations import digest_of, save_whole, storing
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.layers import run_layers
from quantmint.calibration.lazy import torch
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.observers import Observation
from quantmint.calibration.parts import text_obstacle
from quantmint.calibration.ranges import Ranges, ranges_of, require_sound, run_resident
from quantmint.calibration.replica import Replica, load_resident, replica
from quantmint.calibration.room import (
    Decision,
    Mode,
    activations_for,
    decide,
    free_bytes,
    host_bytes,
    measuring,
    need_of,
)


class Watcher(Protocol):
    """The protocol by which calibration reports its progress."""

    def bar(self, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Show a progress bar of ``total`` units; the context's value is called with the units of each advance."""

    def say(self, message: str) -> None:
        """Show one line about the current work."""

    def warn(self, message: str) -> None:
        """Show one line that must not be missed."""


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """Measured ranges and the mode of the calibration.

    ``warnings`` are sentences about experts that few tokens reached, or that only the router's tokens could be shown
    to.
    """

    ranges: Ranges
    decision: Decision
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Execution:
    """Devices, folder, mode and memory of a calibration; none of these changes the ranges on devices of one kind.

    Each of the ``devices`` has a copy of the model, or of its current layer, and the copies share the batches. With
    ``elsewhere``, other machines measure, and the copies here only show the model's structure. ``work`` is a folder for
    the state that an interrupted run resumes from; it is removed at the end. The mode "auto" takes the mode that needs
    less memory (`calibration.room.decide`). In layer mode ``activation_bytes`` of the host's memory hold hidden states
    (None: a quarter of the free memory), and the rest is spilled to ``work``.
    """

    devices: Sequence[str]
    work: Path
    mode: Mode = "auto"
    activation_bytes: int | None = None
    elsewhere: Places | None = None


def calibrate(
    folder: Path,
    batches: Sequence[torch.Tensor],
    observation: Observation,
    execution: Execution,
    *,
    watcher: Watcher,
    trust_remote_code: bool = False,
) -> CalibrationOutcome:
    """Measure the 16-bit model in ``folder`` on batches of token ids, int64 [batch, sequence] without padding.

    The same samples in other batches may change the last bit of a range. Raises `CalibrationError`, whose message says
    why the model cannot be measured and what to do instead.
    """
    devices, work, elsewhere = execution.devices, execution.work, execution.elsewhere
    with measuring(folder):
        replicas = [replica(folder, device, trust_remote_code=trust_remote_code) for device in devices]
        if (reason := text_obstacle(replicas[0].model)) is not None:
            raise CalibrationError(f"{folder}: it cannot be measured on text alone: {reason}")
        need = need_of(replicas[0], batches)
        free = {device: free_bytes(device) for device in devices} if elsewhere is None else elsewhere.free
        places = tuple(devices) if elsewhere is None else tuple(free)
        decision = decide(execution.mode, need, places, free, replicas[0].obstacle)
        watcher.say(f"{decision.mode} mode on {', '.join(places)}: {decision.reason}")
        if elsewhere is not None:
            order = ShareOrder(
                folder.resolve(),  # a relative path is another one elsewhere
                work.resolve(),
                observation,
                decision.mode,
                execution.activation_bytes,
                trust_remote_code,
                torch.get_num_threads() if elsewhere.device == "cpu" else 0,
            )
            measurement = _by_shares(elsewhere, order, batches, watcher)
        else:
            host = host_bytes(execution.activation_bytes) // len(devices)
            measurement = _here(replicas, batches, observation, decision.mode, work, host, watcher)
        magnitudes = measurement.finish()
        require_sound(replicas[0], magnitudes)
    shutil.rmtree(work, ignore_errors=True)
    warnings = measurement.warnings()
    for sentence in warnings:
        watcher.warn(sentence)
    return CalibrationOutcome(ranges_of(replicas[0], magnitudes), decision, warnings)


def _here(
    replicas: Sequence[Replica],
    batches: Sequence[torch.Tensor],
    observation: Observation,
    mode: Literal["resident", "layer"],
    work: Path,
    host: int,
    watcher: Watcher,
) -> Measurement:
    """Measure on the devices of this process; each replica takes an equal share of the batches."""
    samples, lock = sum(batch.shape[0] for batch in batches), threading.Lock()
    steps = 1 if mode == "resident" else len(replicas[0].walkable.layers)

    def run(turn: int) -> Measurement:
        copy, mine = replicas[turn], batches[turn :: len(replicas)]
        if mode == "resident":
            copy.weights.load(copy.body)
        return measured(copy, mine, observation, mode, work / f"{turn}", host, advance_all)

    with watcher.bar(steps * samples, "samples" if mode == "resident" else "layer samples") as advance:

        def advance_all(count: int) -> None:
            with lock:
                advance(count)

        turns = range(min(len(replicas), len(batches)))
        if len(turns) == 1:  # in this thread, whose memory the C library gives back
            return run(0)
        total = Measurement(observation)
        with ThreadPoolExecutor(len(turns)) as pool:  # all are waited for, but by Ctrl-C, which waits for none
            running = [pool.submit(run, turn) for turn in turns]
        for future in running:
            total.add(future.result())
    return total


def _by_shares(elsewhere: Places, order: ShareOrder, batches: Sequence[torch.Tensor], watcher: Watcher) -> Measurement:
    shares = prepared(order, batches, len(elsewhere.free))
    missing = [share for share in shares if not is_finished(order, share)]
    if len(missing) < len(shares):
        watcher.say(f"{len(shares) - len(missing)} of {len(shares)} shares were measured before")
    with watcher.bar(sum(share.samples for share in shares), "samples") as advance:
        advance(sum(share.samples for share in shares) - sum(share.samples for share in missing))
        for share in elsewhere.measure(order, missing):
            advance(share.samples)
    return joined(order, shares)


SHARES_A_PLACE = 4
"""In resident mode, where a process that measures several shares loads the model once: what is lost with a machine is
an eighth of its work on average. In layer mode every share reads the whole model, so each place has one; a share that
was lost there goes on at a layer."""
_BATCHES = "batches.safetensors"


@dataclass(frozen=True, slots=True)
class ShareOrder:
    """Settings common to all shares; every machine must see ``folder``, the model, and ``work`` under these paths.

    ``threads`` is PyTorch's number of threads on a CPU, 0 where GPUs compute: how a product is cut among threads may
    decide its last bit.
    """

    folder: Path
    work: Path
    observation: Observation
    mode: Literal["resident", "layer"]
    activation_bytes: int | None
    trust_remote_code: bool
    threads: int


@dataclass(frozen=True, slots=True)
class Share:
    """One part of the batches, measured by one process: its number, its batches' numbers, and its samples' count."""

    number: int
    batches: tuple[int, ...]
    samples: int


class Places(Protocol):
    """Protocol of machines or GPUs that measure shares, several at a time; ``device`` is PyTorch's device type."""

    @property
    def device(self) -> Literal["cpu", "cuda"]: ...  # noqa: D102

    @property
    def free(self) -> Mapping[str, int]:
        """Return the free bytes of memory by the name of each place: a GPU, or a machine that computes on its CPU."""

    def measure(self, order: ShareOrder, shares: Sequence[Share]) -> Iterator[Share]:
        """Have each share measured by `measure_share`; yield each share when it is finished."""


def split(count: int, places: int, mode: Literal["resident", "layer"]) -> tuple[tuple[int, ...], ...]:
    """Deal the batch numbers 0 to ``count`` - 1 out to shares, none of them empty; return the numbers of each share.

    In resident mode each of the ``places`` gets `SHARES_A_PLACE` shares, in layer mode one.
    """
    shares = min(count, places * (SHARES_A_PLACE if mode == "resident" else 1))
    return tuple(tuple(range(turn, count, shares)) for turn in range(shares))


def prepared(order: ShareOrder, batches: Sequence[torch.Tensor], places: int) -> tuple[Share, ...]:
    """Write the batches for all machines into the work folder, and return the shares that they are split into.

    Where an earlier run began with the same model, observation, threads and batches, its split and finished shares are
    kept; otherwise the folder is emptied first. Raises `CalibrationError` where the folder cannot be written.
    """
    from safetensors import safe_open

    identity = digest_of([str(order.folder), asdict(order.observation), order.threads], batches)
    header, path = {"identity": ""}, order.work / _BATCHES
    with storing("the shares", order.work):
        if path.is_file():
            with safe_open(path, framework="pt") as stored:
                header = stored.metadata()
        if header["identity"] != identity:
            shutil.rmtree(order.work, ignore_errors=True)
            order.work.mkdir(parents=True)
            header = {"identity": identity, "shares": json.dumps(split(len(batches), places, order.mode))}
            tensors = {f"{number}": batch.contiguous().clone() for number, batch in enumerate(batches)}
            save_whole(path, tensors, header)
    return tuple(
        Share(number, tuple(mine), sum(batches[index].shape[0] for index in mine))
        for number, mine in enumerate(json.loads(header["shares"]))
    )


def is_finished(order: ShareOrder, share: Share) -> bool:
    """Return whether a share was measured, by this run or an earlier one.

    The folder is listed rather than the file looked up: a network filesystem caches for a while that a name was
    missing. Raises `CalibrationError` where the folder cannot be listed.
    """
    with storing("the shares", order.work):
        return _final(order, share) in order.work.iterdir()


def measure_share(order: ShareOrder, share: Share, device: str) -> None:
    """Measure a share on a device of this machine, and write the measurement into the order's work folder.

    A share that is finished is left alone. In resident mode the model stays loaded for the next share. Raises
    `CalibrationError` where the model cannot be measured or the folder cannot be written.
    """
    from safetensors import safe_open

    if is_finished(order, share):
        return
    folder = order.work / f"work-{share.number:05}"
    with measuring(order.folder), storing("the shares", order.work):
        with safe_open(order.work / _BATCHES, framework="pt") as stored:
            batches: list[torch.Tensor] = [stored.get_tensor(f"{number}") for number in share.batches]
        load = _loaded if order.mode == "resident" else replica
        copy = load(order.folder, device, trust_remote_code=order.trust_remote_code)
        host = host_bytes(order.activation_bytes)
        measured(copy, batches, order.observation, order.mode, folder, host).save(_final(order, share))
    shutil.rmtree(folder, ignore_errors=True)


def measured(
    copy: Replica,
    batches: Sequence[torch.Tensor],
    observation: Observation,
    mode: Literal["resident", "layer"],
    work: Path,
    host: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Measurement:
    """Measure a model on one device, resuming from the state in ``work``; in resident mode ``copy`` must be loaded.

    In layer mode hidden states that do not fit in ``host`` bytes of memory are spilled to ``work``. ``advance`` is
    called with numbers of samples.
    """
    if mode == "resident":
        return run_resident(copy, batches, observation, work, advance)
    activations = activations_for([copy.device], need_of(copy, batches), host, work)
    return run_layers(copy, batches, observation, activations, advance)


def joined(order: ShareOrder, shares: Sequence[Share]) -> Measurement:
    """Return the measurements of all shares added up. Raises `CalibrationError` where one cannot be read."""
    total = Measurement(order.observation)
    for share in shares:
        path = _final(order, share)
        if not is_finished(order, share):
            raise CalibrationError(f"{path} was measured elsewhere, and cannot be seen here")
        total.add(Measurement.load(order.observation, path))
    return total


@lru_cache(maxsize=1)
def _loaded(folder: Path, device: str, *, trust_remote_code: bool) -> Replica:
    return load_resident(folder, device, trust_remote_code=trust_remote_code)


def _final(order: ShareOrder, share: Share) -> Path:
    return order.work / f"share-{share.number:05}.pt"
