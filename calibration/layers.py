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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.activations import STATE, Activations, committed_layers, state_file
from calibration.calls import Call, layer_names, record
from calibration.hooks import watching
from calibration.measurement import Key, Measurement, merged, recording_cache
from calibration.observers import Observation
from calibration.ranges import require_sound
from calibration.replica import Replica
from calibration.weights import held

if TYPE_CHECKING:
    import torch

_RANGES = "ranges.safetensors"


@dataclass(slots=True)
class Found:
    """What is known of the layers that are done."""

    magnitudes: dict[Key, torch.Tensor] = field(default_factory=dict)
    starved: dict[str, int] = field(default_factory=dict)
    routed_only: set[str] = field(default_factory=set)

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
    start, found = _resume(activations.folder, identity)
    parts = [Part(replica, layers, range(turn, len(batches), len(replicas))) for turn, replica in enumerate(replicas)]
    if start:
        activations.resume(start, len(batches))
    else:
        activations.start()
    samples = sum(batch.shape[0] for batch in batches)
    clock = Clock(commit_seconds)
    with ThreadPoolExecutor(len(parts)) as pool:
        try:
            _all(pool, parts, lambda part: part.record(batches, activations, keep=not start))
            if not start:
                activations.advance()  # what the embedding part made enters the first layer
            advance(samples * start)
            common: dict[str, Any] = {"observation": observation, "activations": activations, "advance": advance}
            for number in range(start, len(layers)):
                measured = _all(pool, parts, partial(Part.run, layer=number, **common))
                if kept is None:
                    require_sound(replicas[0], found.add(merged(measured)), f"{layers[number]}.")
                else:
                    kept(number, merged(measured))
                activations.advance()
                if number + 1 < len(layers) and clock.is_due():
                    clock.run(lambda: activations.commit(lambda folder: _save(folder, identity, found)))
        finally:
            for part in parts:
                part.close()
    return found


class Part:
    """A replica's share of the batches, and its weights: those of the layer at hand and of the next one."""

    def __init__(self, replica: Replica, layers: list[str], numbers: Sequence[int]) -> None:
        self.replica, self.layers, self.numbers = replica, layers, numbers
        self.calls: dict[int, list[Call]] = {}
        self._ahead: Future[None] | None = None
        self._reader = ThreadPoolExecutor(1)

    def record(self, batches: Sequence[torch.Tensor], activations: Activations, *, keep: bool) -> None:
        """Learn how the layers are called, and ``keep`` what enters the first one."""
        replica = self.replica
        inside = tuple(f"{name}." for name in self.layers)
        outside = [name for name in replica.body if not name.startswith(inside)]
        replica.weights.load(outside)
        recorded = record(replica, self.layers, (batches[number] for number in self.numbers))
        for number, (hidden, calls) in zip(self.numbers, recorded, strict=True):
            self.calls[number] = calls
            if keep:
                activations.put(number, hidden)
        replica.weights.free(outside)

    def enter(self, layer: int) -> Any:
        """A layer with its weights; those of the next one are read from now on."""
        (self._ahead or self._read(layer)).result()
        self._ahead = self._read(layer + 1) if layer + 1 < len(self.layers) else None
        return self.replica.model.get_submodule(self.layers[layer])

    def run(
        self, layer: int, observation: Observation, activations: Activations, advance: Callable[[int], None]
    ) -> Measurement:
        """Take all batches through a layer."""
        import torch

        replica, name, module = self.replica, self.layers[layer], self.enter(layer)
        measurement = Measurement(observation)
        with watching(replica.model, name, measurement), torch.inference_mode():
            for number in self.numbers:
                hidden = activations.get(number, replica.device)
                cache = recording_cache(measurement, replica.attention)
                activations.put(number, self.calls[number][layer].run(module, hidden, cache))
                measurement.forget_last()
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


def _all(pool: ThreadPoolExecutor, parts: Sequence[Part], work: Callable[[Part], Any]) -> list[Any]:
    if len(parts) == 1:  # in this thread, whose memory the C library gives back
        return [work(parts[0])]
    # All are waited for, so that none still works when the first fault is reported.
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


def _save(folder: Path, identity: str, found: Found) -> None:
    from safetensors.torch import save_file

    save_file({f"{name}.{kind}": amax.clone() for (kind, name), amax in found.magnitudes.items()}, folder / _RANGES)
    facts = {"identity": identity, "starved": found.starved, "routed_only": sorted(found.routed_only)}
    (folder / STATE).write_text(json.dumps(facts), encoding="utf-8")


def _resume(folder: Path, identity: str) -> tuple[int, Found]:
    """The layer to go on at, and what is known until there; 0 where nothing of this run is there."""
    from safetensors.torch import load_file

    for layer in committed_layers(folder):
        path = state_file(folder, layer)
        facts: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if facts["identity"] != identity:
            continue
        found = Found(starved=facts["starved"], routed_only=set(facts["routed_only"]))
        for key, amax in load_file(path.with_name(_RANGES)).items():
            name, _, kind = key.rpartition(".")
            found.magnitudes[kind, name] = amax
        return layer, found
    return 0, Found()


class Clock:
    """When the next commit is due, by the work since the last one and by what that one took."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._took = seconds, time.monotonic(), 0.0

    def is_due(self) -> bool:
        """Whether it is time."""
        return time.monotonic() - self._since >= (self._seconds and max(self._seconds, 9 * self._took))

    def run(self, commit: Callable[[], None]) -> None:
        """Commit, and begin anew."""
        began = time.monotonic()
        commit()
        self._since = time.monotonic()
        self._took = self._since - began
