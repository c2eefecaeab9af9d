"""Layer mode: one layer's weights at a time, all batches through each, for models that fit no device.

The embedding part runs once (`calibration.calls`); then every layer is loaded, each batch takes one forward through it
in which its ranges are taken too, and the layer is freed. The next layer's weights are read meanwhile, so two layers'
are there at most. Several devices split the batches, and each loads the layer.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from calibration.activations import Activations, last_commit
from calibration.calls import Call, layer_names, record
from calibration.hooks import watching
from calibration.lazy import torch
from calibration.measurement import Key, Measurement, merged, recording_cache
from calibration.observers import Observation
from calibration.ranges import require_sound
from calibration.replica import Replica
from calibration.weights import held


@dataclass(slots=True)
class Found:
    """What is known of the layers that are done."""

    magnitudes: dict[Key, torch.Tensor] = field(default_factory=dict)
    starved: dict[str, int] = field(default_factory=dict)
    routed_only: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Found:
        """What `state` gave, which may be nothing."""
        keys = {key: key.rpartition(".") for key in tensors}
        magnitudes: dict[Any, torch.Tensor] = {(kind, name): tensors[key] for key, (name, _, kind) in keys.items()}
        return cls(magnitudes, dict(facts.get("starved", {})), set(facts.get("routed_only", ())))

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """All of it as plain facts and tensors."""
        tensors = {f"{name}.{kind}": amax.clone() for (kind, name), amax in self.magnitudes.items()}
        return {"starved": self.starved, "routed_only": sorted(self.routed_only)}, tensors

    def add(self, measured: Measurement) -> dict[Key, torch.Tensor]:
        """Take what follows from a measurement of all batches; returns its magnitudes."""
        magnitudes = measured.finish()
        self.magnitudes.update(magnitudes)
        self.starved.update(measured.starved())
        self.routed_only |= measured.routed_only
        return magnitudes


def run_layers(
    replicas: Sequence[Replica],
    batches: Sequence[torch.Tensor],
    observation: Observation,
    activations: Activations,
    *,
    advance: Callable[[int], None] = lambda _: None,
    commit_seconds: float = 60.0,
    kept: Callable[[int, Measurement], None] | None = None,
) -> Found:
    """Measure a model layer by layer, going on at the last layer that an earlier attempt committed.

    ``replicas`` are the model with nothing loaded, once a device; they take turns with the batches, int64 token ids of
    [batch, sequence]. ``advance`` is told the number of samples after each batch of each layer, also of layers that
    were done before. After ``commit_seconds`` of work the run is made resumable, which takes a tenth of the time at
    most. ``kept`` takes the measurement of each layer, by its number, where it is a part of what others measure too: it
    must be on the disk for good on return. Nothing follows from it here, and nothing is found.

    Raises `CalibrationError` where what was seen is not finite, weights are missing, or the disk is full, and
    `NotReplayableError` where the layers cannot be run one at a time.
    """
    layers = layer_names(replicas[0].model, replicas[0].attention.values())
    identity = digest_of([asdict(observation), sorted(replicas[0].owned.items())], batches)
    start, facts, tensors = last_commit(activations.folder, identity)
    parts = [Part(replica, layers, range(turn, len(batches), len(replicas))) for turn, replica in enumerate(replicas)]
    found = Found.of(facts, tensors)

    def work(number: int) -> None:
        given: dict[str, Any] = {"observation": observation, "activations": activations, "advance": advance}
        measured = merged(on_each(parts, lambda part: part.run(number, **given)))
        if kept is None:
            require_sound(replicas[0], found.add(measured), f"{layers[number]}.")
        else:
            kept(number, measured)

    walk(parts, batches, activations, (start, identity), work, found.state, advance, commit_seconds)
    return found


def walk(
    parts: Sequence[Part],
    batches: Sequence[torch.Tensor],
    activations: Activations,
    since: tuple[int, str],
    work: Callable[[int], None],
    state: Callable[[], tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]],
    advance: Callable[[int], None],
    commit_seconds: float,
) -> None:
    """Go through the layers, from the one of `last_commit` and its identity on: ``work`` is called with each number.

    ``state`` is what is committed beside the hidden states, ``commit_seconds`` of work after the last time.
    """
    start, identity = since
    if start:
        activations.resume(start, len(batches))
    else:
        activations.start()
    committed, took = time.monotonic(), 0.0
    try:
        on_each(parts, lambda part: part.record(batches, activations, keep=not start))
        if not start:
            activations.advance()  # what the embedding part made enters the first layer
        advance(start * sum(batch.shape[0] for batch in batches))
        for number in range(start, count := len(parts[0].layers)):
            work(number)
            activations.advance()
            began = time.monotonic()
            if number + 1 < count and began - committed >= (commit_seconds and max(commit_seconds, 9 * took)):
                facts, tensors = state()
                activations.commit({"identity": identity, **facts}, tensors)
                committed = time.monotonic()
                took = committed - began
    finally:
        for part in parts:
            part.close()


class Part:
    """A replica's share of the batches, and its weights: those of the layer at hand and of the next one."""

    def __init__(self, replica: Replica, layers: list[str], numbers: Sequence[int]) -> None:
        self.replica, self.layers, self.numbers = replica, layers, numbers
        self.calls: dict[int, list[Call]] = {}
        self._ahead: Future[None] | None = None
        self._reader = ThreadPoolExecutor(1)

    def record(self, batches: Sequence[torch.Tensor], activations: Activations, *, keep: bool) -> None:
        """Learn how the layers are called, and ``keep`` what enters the first one."""
        with self.replica.around(self.layers):
            recorded = record(self.replica, self.layers, (batches[number] for number in self.numbers))
            for number, (hidden, calls) in zip(self.numbers, recorded, strict=True):
                self.calls[number] = calls
                if keep:
                    activations.put(number, hidden)

    def enter(self, layer: int) -> Any:
        """A layer with its weights; those of the next one are read from now on."""
        (self._ahead or self._read(layer)).result()
        self._ahead = self._read(layer + 1) if layer + 1 < len(self.layers) else None
        return self.replica.model.get_submodule(self.layers[layer])

    def run(
        self, layer: int, observation: Observation, activations: Activations, advance: Callable[[int], None]
    ) -> Measurement:
        """Take all batches through a layer."""
        replica, name, module = self.replica, self.layers[layer], self.enter(layer)
        measurement = Measurement(observation)
        with watching(replica.model, name, measurement), torch.inference_mode():
            for number in self.numbers:
                hidden = activations.get(number, replica.device)
                cache = recording_cache(measurement, replica.attention)
                activations.put(number, self.calls[number][layer].run(module, hidden, cache))
                measurement.end_batch()
                advance(hidden.shape[0])
        replica.weights.free(held(replica.model, name))
        return measurement

    def _read(self, layer: int) -> Future[None]:
        wanted = held(self.replica.model, self.layers[layer])

        def load() -> None:
            self.replica.weights.load(wanted)
            self.replica.weights.touch(wanted)

        return self._reader.submit(load)

    def close(self) -> None:
        """Read no further."""
        self._reader.shutdown(wait=True, cancel_futures=True)


def on_each(parts: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """What work with each part gives, all at once."""
    if len(parts) == 1:  # in this thread, whose memory the C library gives back
        return [work(parts[0])]
    # All are waited for, so that none still works when the first fault is reported; Ctrl-C waits for none.
    with ThreadPoolExecutor(len(parts)) as pool:
        running = [pool.submit(work, part) for part in parts]
    faults = [fault for one in running if (fault := one.exception()) is not None]
    if faults:
        raise faults[0]
    return [one.result() for one in running]


def digest_of(facts: Any, batches: Sequence[torch.Tensor]) -> str:
    """SHA-256, hex, of plain values and of batches: what must be equal for a run to be gone on with."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for batch in batches:
        digest.update(f"{list(batch.shape)}".encode())
        digest.update(batch.numpy().tobytes())
    return digest.hexdigest()
