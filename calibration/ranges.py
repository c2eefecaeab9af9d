"""Measured ranges: the largest magnitude of each observed tensor, in one small file that every scheme reuses.

Ranges meet by maximum, which no order of batches, devices or machines can change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from calibration.activations import Pace, digest_of
from calibration.errors import CalibrationError
from calibration.hooks import watching
from calibration.lazy import torch
from calibration.measurement import Key, Measurement, recording_cache
from calibration.observers import Observation
from calibration.replica import Replica, on_disk, sources


@dataclass(frozen=True, slots=True)
class Ranges:
    """Largest magnitudes, float32.

    ``inputs``: by linear module, shape []. ``keys`` and ``values``: by attention module, one value a KV head, [H_kv];
    keys are taken after the rotary embedding, which is what a server caches.
    """

    inputs: Mapping[str, torch.Tensor]
    keys: Mapping[str, torch.Tensor]
    values: Mapping[str, torch.Tensor]

    def save(self, path: Path) -> None:
        """Write a safetensors file with the names ``MODULE.input``, ``MODULE.k`` and ``MODULE.v``."""
        from safetensors.torch import save_file

        # Modules with one input have one tensor here, which the file holds for each of them.
        tables = {"input": self.inputs, "k": self.keys, "v": self.values}
        tensors = {f"{module}.{kind}": amax.clone() for kind, table in tables.items() for module, amax in table.items()}
        save_file(dict(sorted(tensors.items())), path)


def load_ranges(path: Path) -> Ranges:
    """Read what `Ranges.save` wrote; raise `CalibrationError` for a file that holds anything else."""
    from safetensors.torch import load_file

    tables: dict[str, dict[str, torch.Tensor]] = {"input": {}, "k": {}, "v": {}}
    for name, amax in load_file(path).items():
        module, _, kind = name.rpartition(".")
        if kind not in tables:
            raise CalibrationError(f"{path}: {name!r} is not a range: expected MODULE.input, MODULE.k or MODULE.v")
        tables[kind][module] = amax
    return Ranges(inputs=tables["input"], keys=tables["k"], values=tables["v"])


_KINDS = {"input": "input", "k": "K", "v": "V"}


def require_sound(replica: Replica, found: Mapping[Key, torch.Tensor], part: str = "") -> None:
    """Raise `CalibrationError` for what is not finite, and for attention below ``part`` that cached nothing.

    Of several, the module that a forward meets first is named: the others may have inherited from it.
    """
    broken = next((key for key, amax in found.items() if not bool(amax.isfinite().all())), None)
    if broken is not None:
        kind, name = broken
        named = {own: disk for disk, own in sources(replica.model, replica.owned).items()}
        stored = named.get(name, name) if kind == "input" else on_disk(name, replica.owned)
        raise CalibrationError(
            f"the {_KINDS[kind]} of {stored} is not finite on the calibration data: {found[broken].tolist()}; a weight "
            "that a forward meets before it holds such a number, or the model overflows its dtype there"
        )
    for name in replica.attention.values():
        if name.startswith(part) and ("k", name) not in found:
            raise CalibrationError(f"{name} cached neither K nor V: its ranges cannot be measured this way")


def ranges_of(replica: Replica, found: Mapping[Key, torch.Tensor]) -> Ranges:
    """Name what was found as the checkpoint does; a module on disk may be a part of one of the model's."""
    named = sources(replica.model, replica.owned)
    caches = {name: on_disk(name, replica.owned) for name in replica.attention.values()}
    return Ranges(
        inputs={disk: found["input", own] for disk, own in named.items() if ("input", own) in found},
        keys={disk: found["k", own] for own, disk in caches.items() if ("k", own) in found},
        values={disk: found["v", own] for own, disk in caches.items() if ("v", own) in found},
    )


RESIDENT_SECONDS = 5.0
"""Work in resident mode after which it is made resumable."""


def run_resident(
    replica: Replica,
    batches: Sequence[torch.Tensor],
    observation: Observation,
    work: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Measurement:
    """Measure a loaded model, going on with what an earlier attempt kept in ``work`` (None: there is nothing to keep).

    ``advance`` is told the number of samples after each batch, first of those that were seen before.
    """
    measurement, pace = Measurement(observation), Pace(RESIDENT_SECONDS)
    facts = [asdict(observation), sorted(replica.owned.items())]
    kept = None if work is None else work / f"{digest_of(facts, batches)}.pt"
    if kept is not None and kept.is_file():
        measurement = Measurement.load(observation, kept)
    advance(sum(batch.shape[0] for batch in batches[: measurement.batches]))

    with watching(replica.model, "", measurement), torch.inference_mode():
        for batch in batches[measurement.batches :]:
            replica.trunk(
                input_ids=batch.to(replica.device),
                past_key_values=recording_cache(measurement, replica.attention),
                use_cache=True,
            )
            measurement.end_batch()
            advance(batch.shape[0])
            if kept is not None:
                pace.step(partial(measurement.save, kept))
    return measurement
