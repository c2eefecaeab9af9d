"""Layer mode: one layer's weights at a time, all batches through each, for models that fit no device.

The embedding part runs once (`calibration.calls`); then every layer is loaded, each batch takes one forward through it
in which its ranges are taken too, and the layer is freed. The next layer's weights are read meanwhile, so two layers'
are there at most. What some models compute behind their last layer runs once too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from typing import Any

from quantmint.calibration.activations import Activations, Pace, digest_of
from quantmint.calibration.caches import empty_cache, recording_cache
from quantmint.calibration.calls import Call, answering, record
from quantmint.calibration.hooks import watching, watching_around
from quantmint.calibration.lazy import torch
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.observers import Observation
from quantmint.calibration.replica import Replica
from quantmint.calibration.weights import held

PARTS = 8
"""Parts of the batches, each summed by itself: as many devices at most can share them."""
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
    walk.through(lambda layer: whole.add(walk.measured(layer, observation)), whole.state, around=whole)
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
        self.layers = self.replica.walkable.layers
        self.calls: list[list[Call]] = [[] for _ in batches]
        self.batches, self._identity = batches, digest_of(facts, batches)
        self._start, self.known = activations.last_commit(self._identity)
        self._ahead: Future[None] | None = None
        self._reader = ThreadPoolExecutor(1)

    def through(
        self,
        work: Callable[[int], None],
        state: Callable[[], Any] = lambda: None,
        around: Measurement | None = None,
    ) -> None:
        """Have ``work`` done with the number of each layer.

        ``state`` gives what is committed beside the hidden states, which takes a tenth of the time at most. ``around``
        gets what enters linear modules before the first layer and behind the last one.
        """
        start, samples = self._start, sum(batch.shape[0] for batch in self.batches)
        self.activations.start(start, len(self.batches) if start else 0)
        pace = Pace(COMMIT_SECONDS)
        try:
            behind = self._record(around, keep=not start)
            self.advance(start * samples)
            for number in range(start, count := len(self.layers)):
                work(number)
                self.activations.advance()
                if number + 1 < count:
                    pace.step(lambda: self.activations.commit(self._identity, state()))
            if around is not None and behind:
                self._measure_behind(around)
        finally:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _record(self, around: Measurement | None, *, keep: bool) -> bool:
        """Learn how the layers are called, and ``keep`` what enters the first one.

        Return whether linear modules run behind the last layer.
        """
        before = around if keep and around is not None else Measurement(Observation())
        behind = Measurement(Observation())
        for replica, numbers in zip(self.replicas, self.dealt, strict=True):
            batches = (self.batches[number] for number in numbers)
            with replica.around(self.layers), watching_around(replica.model, self.layers, before, behind):
                for number, (states, calls) in zip(numbers, record(replica, batches), strict=True):
                    self.calls[number] = calls
                    before.end_batch()
                    if keep:
                        self.activations.put(number, states)
        if keep:
            self.activations.advance()
        return bool(behind.summaries)

    def _measure_behind(self, measurement: Measurement) -> None:
        """Measure what enters linear modules behind the last layer, from its hidden states."""
        replica, layers = self.replica, self.layers
        with replica.around(layers), torch.inference_mode():
            for number, calls in enumerate(self.calls):
                leaving = calls[-1].returned(self.activations.get(number, replica.device).hidden)
                before = Measurement(Observation())
                with (
                    answering(replica.model, layers, leaving),
                    watching_around(replica.model, layers, before, measurement),
                ):
                    replica.run(self.batches[number], empty_cache(replica.model))
                measurement.end_batch()

    @property
    def parts(self) -> list[range]:
        """The numbers of the batches of each part, however many replicas there are; each part is one replica's."""
        return [range(first, len(self.batches), PARTS) for first in range(min(PARTS, len(self.batches)))]

    @property
    def dealt(self) -> list[list[int]]:
        """The numbers of the batches of each replica: those of every n-th part."""
        return [sorted(chain(*self.parts[turn :: len(self.replicas)])) for turn in range(len(self.replicas))]

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
