"""Ranges of a model of any size, on one device or several.

    outcome = calibrate(folder, batches, Observation(), devices=["cuda:0", "cuda:1"], work=scratch)
    outcome.ranges.save(path)

Layer by layer (`calibration.layers`), or with the whole model loaded (`calibration.ranges`) where its layers cannot be
run one at a time or the hidden states between them are larger. The same batches give the same ranges to the last bit,
whichever it is, on however many devices of a kind, and in whatever order.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from calibration.calls import layer_names
from calibration.lazy import torch
from calibration.measurement import Measurement
from calibration.observers import Observation
from calibration.ranges import Ranges, ranges_of, require_sound
from calibration.replica import Replica, replica
from calibration.room import Decision, Mode, decide, free_bytes, host_bytes, measuring, need_of
from calibration.shares import Order, Places, is_finished, joined, measured, prepared


class Watcher(Protocol):
    """Who is told how far it is."""

    def bar(self, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """A bar over ``total`` units; the value is called with each advance."""

    def say(self, message: str) -> None:
        """One line about what goes on now."""

    def warn(self, message: str) -> None:
        """One line that must not be missed."""


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
    elsewhere: Places | None = None,
) -> Outcome:
    """Measure the 16-bit model in ``folder`` on batches of tokens: int64 ids of [batch, sequence], no padding.

    How batches are composed decides the last bit. Each of the ``devices`` has a copy of the model, or of its layer, and
    the copies share the batches; with ``elsewhere``, other machines, they only say what is computed on. ``work`` is a
    folder for what an interrupted run is gone on with; it is removed at the end. The mode
    "auto" takes what needs less memory (`calibration.room.decide`). ``activation_bytes`` of the host's memory are for
    hidden states in layer mode, the rest of which is spilled to ``work``; None takes a quarter of what is free.

    Raises `CalibrationError`, which says why the model cannot be measured, and what to do instead.
    """
    with measuring(folder):
        replicas = [replica(folder, device, trust_remote_code=trust_remote_code) for device in devices]
        need, obstacle = need_of(replicas[0], batches)
        free = {device: free_bytes(device) for device in devices} if elsewhere is None else elsewhere.free
        places = tuple(devices) if elsewhere is None else tuple(free)
        decision = decide(mode, need, places, free, obstacle)
        watcher.say(f"{decision.mode} mode on {', '.join(places)}: {decision.reason}")
        if elsewhere is not None:
            order = Order(
                folder.resolve(),  # a relative path is another one elsewhere
                work.resolve(),
                observation,
                decision.mode,
                activation_bytes,
                trust_remote_code,
                torch.get_num_threads() if elsewhere.device == "cpu" else 0,
            )
            found = _by_shares(elsewhere, order, batches, watcher)
        else:
            host = host_bytes(activation_bytes) // len(devices)
            found = _here(replicas, batches, observation, decision.mode, work, host, watcher)
        magnitudes = found.finish()
        require_sound(replicas[0], magnitudes)
    shutil.rmtree(work, ignore_errors=True)
    warnings = found.warnings()
    for sentence in warnings:
        watcher.warn(sentence)
    return Outcome(ranges_of(replicas[0], magnitudes), decision, warnings)


def _here(
    replicas: Sequence[Replica],
    batches: Sequence[torch.Tensor],
    observation: Observation,
    mode: Literal["resident", "layer"],
    work: Path,
    host: int,
    watcher: Watcher,
) -> Measurement:
    """Measure on the devices of this process, each its share of the batches."""
    samples, lock = sum(batch.shape[0] for batch in batches), threading.Lock()
    steps = 1 if mode == "resident" else len(layer_names(replicas[0].model, replicas[0].attention.values()))

    def run(turn: int) -> Measurement:
        one, mine = replicas[turn], batches[turn :: len(replicas)]
        if mode == "resident":
            one.weights.load(one.body)
        return measured(one, mine, observation, mode, work / f"{turn}", host, told)

    with watcher.bar(steps * samples, "samples" if mode == "resident" else "layer samples") as advance:

        def told(count: int) -> None:
            with lock:
                advance(count)

        turns = range(min(len(replicas), len(batches)))
        if len(turns) == 1:  # in this thread, whose memory the C library gives back
            return run(0)
        found = Measurement(observation)
        with ThreadPoolExecutor(len(turns)) as pool:  # all are waited for, but by Ctrl-C, which waits for none
            running = [pool.submit(run, turn) for turn in turns]
        for each in running:
            found.add(each.result())
    return found


def _by_shares(elsewhere: Places, order: Order, batches: Sequence[torch.Tensor], watcher: Watcher) -> Measurement:
    shares = prepared(order, batches, len(elsewhere.free))
    missing = [share for share in shares if not is_finished(order, share)]
    if len(missing) < len(shares):
        watcher.say(f"{len(shares) - len(missing)} of {len(shares)} shares were measured before")
    with watcher.bar(sum(share.samples for share in shares), "samples") as advance:
        advance(sum(share.samples for share in shares) - sum(share.samples for share in missing))
        for share in elsewhere.measure(order, missing):
            advance(share.samples)
    return joined(order, shares)
