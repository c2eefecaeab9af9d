"""Measured ranges: the largest magnitude of each observed tensor, in one small file that every scheme reuses.

Ranges meet by maximum, which no order of batches, devices or machines can change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from quantmint.calibration.activations import Pace, digest_of
from quantmint.calibration.caches import recording_cache
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.hooks import watching
from quantmint.calibration.lazy import torch
from quantmint.calibration.measurement import Key, Kind, Measurement
from quantmint.calibration.observers import Observation
from quantmint.calibration.replica import Replica, on_disk, sources


@dataclass(frozen=True, slots=True)
class Ranges:
    """Largest magnitudes, float32, by the checkpoint's names of modules.

    ``inputs`` of linear modules, shape []. ``keys`` and ``values`` of attention modules, one for each KV head, [H_kv];
    keys are taken after the rotary embedding, as a server caches them. ``latents`` of latent attention modules, [2]:
    the latent and the rotated part of the keys, which a server caches there. ``latents`` are always the largest
    magnitudes, whatever the observer of the others.
    """

    inputs: Mapping[str, torch.Tensor]
    keys: Mapping[str, torch.Tensor]
    values: Mapping[str, torch.Tensor]
    latents: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a safetensors file with the names ``MODULE.input``, ``MODULE.k``, ``MODULE.v``, ``MODULE.latent``."""
        from safetensors.torch import save_file

        # Modules with one input have one tensor here, which the file holds for each of them.
        tables = {kind: getattr(self, table) for kind, table in _TABLES.items()}
        tensors = {f"{module}.{kind}": amax.clone() for kind, table in tables.items() for module, amax in table.items()}
        save_file(dict(sorted(tensors.items())), path)


_TABLES = {"input": "inputs", "k": "keys", "v": "values", "latent": "latents"}


def load_ranges(path: Path) -> Ranges:
    """Read a file that `Ranges.save` wrote.

    Raises `CalibrationError` for a file that cannot be read and for a tensor that is not named as a range.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"{path}: the ranges cannot be read: {error}") from error
    tables: dict[str, dict[str, torch.Tensor]] = {table: {} for table in _TABLES.values()}
    for name, amax in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind not in _TABLES:
            expected = ", ".join(f"MODULE.{kind}" for kind in _TABLES)
            raise CalibrationError(f"{path}: {name!r} is not a range: expected one of {expected}")
        tables[_TABLES[kind]][module] = amax
    return Ranges(**tables)


_KINDS = {"input": "input", "k": "K", "v": "V", "latent": "latent", "rotary": "rotated part of K"}


def require_sound(replica: Replica, magnitudes: Mapping[Key, torch.Tensor], part: str = "") -> None:
    """Raise `CalibrationError` if a magnitude is not finite, or if attention below ``part`` has cached nothing.

    The message names the first module of the forward whose magnitude is not finite: later ones may have inherited it.
    Attention that text does not reach, such as attention to images, need not cache anything.
    """
    broken = next((key for key, amax in magnitudes.items() if not bool(amax.isfinite().all())), None)
    if broken is not None:
        kind, name = broken
        named = {own: disk for disk, own in sources(replica.model, replica.owned).items()}
        stored = named.get(name, name) if kind == "input" else on_disk([name], replica.owned)[name]
        raise CalibrationError(
            f"the {_KINDS[kind]} of {stored} is not finite on the calibration data: {magnitudes[broken].tolist()}; a "
            "weight that a forward meets before it holds such a number, or the model overflows its dtype there"
        )
    for name in replica.attention:
        ran = any(kind == "input" and module.startswith(f"{name}.") for kind, module in magnitudes)
        if name.startswith(part) and ran and name not in replica.shared and ("k", name) not in magnitudes:
            raise CalibrationError(f"{name} cached neither K nor V: its ranges cannot be measured this way")


def ranges_of(replica: Replica, magnitudes: Mapping[Key, torch.Tensor]) -> Ranges:
    """Return the magnitudes as ranges, by the checkpoint's names of modules.

    A module on disk may be a part of one of the model's modules, or stand for several that share its weight.
    """
    named = sources(replica.model, replica.owned)
    caches = on_disk(replica.attention, replica.owned)
    largest = _by_weight(replica, magnitudes)

    def cached(kind: Kind) -> Iterator[tuple[str, torch.Tensor]]:
        for own, disk in caches.items():
            amax = magnitudes.get((kind, replica.shared.get(own, own)))
            if amax is not None:
                yield disk, amax

    return Ranges(
        inputs={disk: amax for disk, own in named.items() if (amax := largest(own)) is not None},
        keys=dict(cached("k")),
        values=dict(cached("v")),
        latents={
            disk: torch.stack((amax, magnitudes.get(("rotary", own), torch.zeros(()))))
            for own, disk in caches.items()
            if (amax := magnitudes.get(("latent", own))) is not None
        },
    )


def _by_weight(replica: Replica, magnitudes: Mapping[Key, torch.Tensor]) -> Callable[[str], torch.Tensor | None]:
    """Return a function that maps a module of the model to the largest input of all modules that share its weight.

    An expert that no token has reached gets the largest input of the experts stacked with it: tokens that reach it
    later come from the same hidden states. The function returns None for a module without a measured input.
    """
    stacked = {name for name, parameter in replica.model.named_parameters() if parameter.ndim == 3}
    inputs = {name: amax for (kind, name), amax in magnitudes.items() if kind == "input"}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, amax in inputs.items():
        stack = name.rpartition(".")[0]
        if stack in stacked:
            stacks.setdefault(stack, []).append(amax)
    tied = replica.tied

    def largest(parameter_name: str) -> torch.Tensor | None:
        magnitudes = [inputs[name] for name in (parameter_name, *tied.get(parameter_name, ())) if name in inputs]
        magnitudes = magnitudes or stacks.get(parameter_name.rpartition(".")[0], [])
        return torch.stack(magnitudes).amax(dim=0) if len(magnitudes) > 1 else next(iter(magnitudes), None)

    return largest


RESIDENT_SECONDS = 5.0
"""Work in resident mode after which it is made resumable."""


def run_resident(
    replica: Replica,
    batches: Sequence[torch.Tensor],
    observation: Observation,
    work: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Measurement:
    """Measure a loaded model, resuming from what an earlier attempt saved in ``work`` (None: nothing is saved).

    ``advance`` is called with the number of samples after each batch, first with those that were measured before.
    """
    measurement, pace = Measurement(observation), Pace(RESIDENT_SECONDS)
    facts = [asdict(observation), sorted(replica.owned.items())]
    progress_file = None if work is None else work / f"{digest_of(facts, batches)}.pt"
    if progress_file is not None and progress_file.is_file():
        measurement = Measurement.load(observation, progress_file)
    advance(sum(batch.shape[0] for batch in batches[: measurement.batches]))

    with watching(replica.model, "", measurement), torch.inference_mode():
        for batch in batches[measurement.batches :]:
            replica.run(batch, recording_cache(replica.model, measurement))
            measurement.end_batch()
            advance(batch.shape[0])
            if progress_file is not None:
                pace.step(partial(measurement.save, progress_file))
    return measurement
