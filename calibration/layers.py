"""Layer mode: one layer's weights at a time, all batches through each, for models that fit no device.

The embedding part runs once (`calibration.calls`); then every layer is loaded, each batch takes one forward through it
in which its ranges are taken too, and the layer is freed. The next layer's weights are read meanwhile, so two layers'
are there at most. What some models compute behind their last layer runs once too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from typing import Any, Self

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
    """Measure a model layer by layer, resuming at the last layer that an earlier attempt committed.

    ``replica`` is the model with nothing loaded, ``batches`` are int64 token ids of [batch, sequence]. ``advance`` is
    called with the number of samples after each batch of each layer, and once for the layers that were committed
    before.

    Raises `CalibrationError` where weights are missing or the disk is full, and `NotReplayableError` where the layers
    cannot be run one at a time.
    """
    facts = [asdict(observation), sorted(replica.owned.items())]
    with LayerRunner([replica], batches, activations, facts, advance) as runner:
        total = Measurement.of(observation, runner.committed) if runner.committed else Measurement(observation)
        runner.record(total)
        for layer in runner:
            total.add(runner.measured(layer, observation))
            runner.finish(layer, total.state)
        runner.measure_behind(total)
    return total


class LayerRunner:
    """Iterate over a model's layers with one layer's weights loaded, and the states of all batches between layers.

    ::

        with LayerRunner(replicas, batches, activations, facts, advance) as runner:
            runner.record()                # run the embedding part
            for layer in runner:           # its weights are loaded, the next layer's are being read
                ...                        # take all batches through it
                runner.finish(layer)       # free its weights, commit now and then

    It begins at the last layer that was committed with the same batches and ``facts``, plain values; ``committed`` is
    the value stored there. Where ``reads_ahead`` is set to False, a layer is read only when it is its turn. Several
    ``replicas`` lie on a device each, and batches are dealt out to them. ``advance`` is called with numbers of samples.
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
        self._start, self.committed = activations.last_commit(self._identity)
        self._ahead: Future[None] | None = None
        self.reads_ahead = True
        self._reader = ThreadPoolExecutor(1)
        self._pace = Pace(COMMIT_SECONDS)
        self._linear_behind = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def record(self, around: Measurement | None = None) -> None:
        """Record how the layers are called, and the states that enter the first layer that is run.

        The inputs of linear modules before the first layer are added to ``around``, unless an earlier attempt committed
        them.
        """
        self.activations.start(self._start, len(self.batches) if self._start else 0)
        self._linear_behind = self._record(around, keep=not self._start)
        self.advance(self._start * sum(batch.shape[0] for batch in self.batches))

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each layer that is left, with its weights loaded; `finish` it before the next."""
        for layer in range(self._start, len(self.layers)):
            (self._ahead or self._read(layer)).result()
            self._ahead = self._read(layer + 1) if self.reads_ahead and layer + 1 < len(self.layers) else None
            yield layer

    def finish(self, layer: int, state: Callable[[], Any] = lambda: None) -> None:
        """Free a layer's weights, and go on to the states that enter the next layer.

        These states are committed with the value of ``state()`` now and then, which takes at most a tenth of the time.
        """
        for replica in self.replicas:
            replica.weights.free(held(replica.model, self.layers[layer]))
        self.activations.advance()
        if layer + 1 < len(self.layers):
            self._pace.step(lambda: self.activations.commit(self._identity, state()))

    def _record(self, around: Measurement | None, *, keep: bool) -> bool:
        """Record the calls of all layers; with ``keep``, store the states that enter the first layer.

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

    def measure_behind(self, measurement: Measurement) -> None:
        """Measure the inputs of linear modules behind the last layer, if any, from the hidden states that leave it."""
        if not self._linear_behind:
            return
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
        """Return the batch numbers of each part; one replica takes a part.

        The parts do not depend on the number of replicas.
        """
        return [range(first, len(self.batches), PARTS) for first in range(min(PARTS, len(self.batches)))]

    @property
    def dealt(self) -> list[list[int]]:
        """Return the sorted batch numbers of each replica: those of every n-th part, for n replicas."""
        return [sorted(chain(*self.parts[turn :: len(self.replicas)])) for turn in range(len(self.replicas))]

    def measured(self, layer: int, observation: Observation) -> Measurement:
        """Take all batches through a layer, and return the measurement of its inputs, keys and values."""
        replica, measurement = self.replica, Measurement(observation)
        module = replica.model.get_submodule(self.layers[layer])
        with watching(replica.model, self.layers[layer], measurement), torch.inference_mode():
            for number, calls in enumerate(self.calls):
                states = self.activations.get(number, replica.device)
                cache = recording_cache(replica.model, measurement)
                self.activations.put(number, calls[layer].run(module, states, cache))
                measurement.end_batch()
                self.advance(self.batches[number].shape[0])
        return measurement

    def _read(self, layer: int) -> Future[None]:
        def load() -> None:
            for replica in self.replicas:
                replica.weights.load(held(replica.model, self.layers[layer]))

        return self._reader.submit(load)
