"""Layer mode: one layer's weights at a time, all batches through each, for models that fit no device.

The embedding part runs once (`calibration.calls`); then every layer is loaded, each batch takes one forward through it
in which its ranges are taken too, and the layer is freed. The next layer's weights are read meanwhile, so two layers'
are there at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from calibration.activations import Activations, Pace, digest_of
from calibration.caches import recording_cache
from calibration.calls import Call, record
from calibration.errors import NotReplayableError
from calibration.hooks import watching
from calibration.lazy import torch
from calibration.measurement import Measurement
from calibration.observers import Observation
from calibration.parts import layer_names
from calibration.replica import Replica
from calibration.weights import held

COMMIT_SECONDS = 300.0
"""Work after which it is made resumable, the most that an interruption costs: states of an 8B model are gigabytes."""


def run_layers(
    replica: Replica,
    batches: Sequence[torch.Tensor],
    observation: Observation,
    activations: Activations,
    advance: Callable[[int], None] = lambda _: None,
) -> Measurement:
    """Measure a model layer by layer, going on at the last layer that an earlier attempt committed.

    ``replica`` is the model with nothing loaded, ``batches`` are int64 token ids of [batch, sequence]. ``advance`` is
    told the number of samples after each batch of each layer, also of layers that were done before.

    Raises `CalibrationError` where weights are missing or the disk is full, and `NotReplayableError` where the layers
    cannot be run one at a time.
    """
    walk = Walk([replica], batches, activations, [asdict(observation), sorted(replica.owned.items())], advance)
    whole = Measurement.of(observation, walk.known) if walk.known else Measurement(observation)
    walk.through(lambda layer: whole.add(walk.measured(layer, observation)), whole.state)
    return whole


class Walk:
    """A model a layer at a time: weights of the layer at hand and of the next one, and the states between layers.

    It begins at the last layer that was committed with the same ``facts``, plain values, and batches; ``known`` is what
    was committed there. Of several ``replicas`` each is on a device of its own, and batches are dealt out to them.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        batches: Sequence[torch.Tensor],
        activations: Activations,
        facts: Any,
        advance: Callable[[int], None],
    ) -> None:
        self.replicas, self.replica, self.activations, self.advance = replicas, replicas[0], activations, advance
        if self.replica.obstacle is not None:
            raise NotReplayableError(self.replica.obstacle)
        self.layers = layer_names(self.replica.model)
        self.calls: list[list[Call]] = [[] for _ in batches]
        self.batches, self._identity = batches, digest_of(facts, batches)
        self._start, self.known = activations.last_commit(self._identity)
        self._ahead: Future[None] | None = None
        self._reader = ThreadPoolExecutor(1)

    def through(self, work: Callable[[int], None], state: Callable[[], Any] = lambda: None) -> None:
        """Have ``work`` done with the number of each layer.

        ``state`` gives what is committed beside the hidden states, which takes a tenth of the time at most.
        """
        start, samples = self._start, sum(batch.shape[0] for batch in self.batches)
        self.activations.start(start, len(self.batches) if start else 0)
        pace = Pace(COMMIT_SECONDS)
        try:
            self._record(keep=not start)
            self.advance(start * samples)
            for number in range(start, count := len(self.layers)):
                work(number)
                self.activations.advance()
                if number + 1 < count:
                    pace.step(lambda: self.activations.commit(self._identity, state()))
        finally:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _record(self, *, keep: bool) -> None:
        """Learn how the layers are called, and ``keep`` what enters the first one."""
        for one, numbers in zip(self.replicas, self.dealt, strict=True):
            mine = (self.batches[number] for number in numbers)
            with one.around(self.layers):
                for number, (states, calls) in zip(numbers, record(one, self.layers, mine), strict=True):
                    self.calls[number] = calls
                    if keep:
                        self.activations.put(number, states)
        if keep:
            self.activations.advance()

    @property
    def dealt(self) -> list[range]:
        """The numbers of the batches of each replica."""
        return [range(turn, len(self.batches), len(self.replicas)) for turn in range(len(self.replicas))]

    def enter(self, layer: int) -> Any:
        """A layer with its weights; those of the next one are read from now on."""
        (self._ahead or self._read(layer)).result()
        self._ahead = self._read(layer + 1) if layer + 1 < len(self.layers) else None
        return self.replica.model.get_submodule(self.layers[layer])

    def leave(self, layer: int) -> None:
        """Let go of a layer's weights."""
        for one in self.replicas:
            one.weights.free(held(one.model, self.layers[layer]))

    def measured(self, layer: int, observation: Observation) -> Measurement:
        """Take all batches through a layer."""
        replica, module, measurement = self.replica, self.enter(layer), Measurement(observation)
        with watching(replica.model, self.layers[layer], measurement), torch.inference_mode():
            for number, calls in enumerate(self.calls):
                states = self.activations.get(number, replica.device)
                cache = recording_cache(replica.model, measurement)
                self.activations.put(number, calls[layer].run(module, states, cache))
                measurement.end_batch()
                self.advance(self.batches[number].shape[0])
        self.leave(layer)
        return measurement

    def _read(self, layer: int) -> Future[None]:
        def load() -> None:
            for one in self.replicas:
                one.weights.load(held(one.model, self.layers[layer]))

        return self._reader.submit(load)
