"""Calibration by several machines that see the same files: each measures shares of the batches, one joins them.

::

    shares = prepared(order, batches, places=8)       # one process
    measure_share(order, share, device, attempt)      # any machine, in any order, again where one was lost
    joined(order, shares)                             # one process: what it would have found by itself

A share that is finished is a folder with its final name. An attempt works in a folder of its own, because one that was
taken for lost may still be at work; whoever comes next takes over the newest of them by renaming it, so that layer mode
goes on at the last layer that was committed. Summaries are joined before anything follows from them, by operations that
no order can change: the ranges are one process' own, to the last bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from calibration.activations import committed_layers, save_whole, storing, sync
from calibration.calls import layer_names
from calibration.errors import CalibrationError
from calibration.layers import Found, digest_of, run_layers
from calibration.lazy import torch
from calibration.measurement import Measurement, merged
from calibration.observers import Observation, Summary
from calibration.ranges import run_resident
from calibration.replica import Replica, load_resident, replica
from calibration.room import activations_for, measuring, need_of

SHARES_A_PLACE = 4
"""In resident mode, where a process that measures several shares loads the model once: what is lost with a machine is
an eighth of its work on average. In layer mode every share reads the whole model, so each place has one; a share that
is taken over there goes on at a layer."""
_BATCHES, _SHARES, _LAYERS, _WHOLE = "batches.safetensors", "shares.json", "layers", "whole"


@dataclass(frozen=True, slots=True)
class Order:
    """What every share is measured with; ``folder`` of the model and ``work`` lie where every machine sees them.

    ``threads`` are PyTorch's on a CPU, 0 where GPUs compute: how a product is cut among them may decide its last bit.
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
    """The numbers of the batches that are measured together, and how many samples they are."""

    number: int
    batches: tuple[int, ...]
    samples: int


class Places(Protocol):
    """Where shares are measured, several at a time. ``device`` is PyTorch's name of what computes there."""

    @property
    def device(self) -> Literal["cpu", "cuda"]: ...  # noqa: D102

    @property
    def free(self) -> Mapping[str, int]:
        """Bytes that are free, by the name of each place: a GPU, or a machine that computes on its CPU."""

    def measure(self, order: Order, shares: Sequence[Share]) -> Iterator[Share]:
        """Have each measured by `measure_share`, and give it when it is finished."""


def split(count: int, places: int, mode: Literal["resident", "layer"]) -> tuple[tuple[int, ...], ...]:
    """Deal ``count`` batches out to shares; none is empty."""
    shares = min(count, places * (SHARES_A_PLACE if mode == "resident" else 1))
    return tuple(tuple(range(turn, count, shares)) for turn in range(shares))


def prepared(order: Order, batches: Sequence[torch.Tensor], places: int) -> tuple[Share, ...]:
    """Write what the machines need. A split that an earlier run of this work began with is kept: so are its shares,
    where they were computed as these are to be.

    Raises `CalibrationError` where it cannot be written.
    """
    from safetensors.torch import save_file

    identity = digest_of([str(order.folder), asdict(order.observation), order.threads], batches)
    with storing("the shares", order.work):
        order.work.mkdir(parents=True, exist_ok=True)
        numbers = _split_of(order.work / _SHARES, identity)
        if numbers is None:
            shutil.rmtree(order.work)
            order.work.mkdir()
            numbers = split(len(batches), places, order.mode)
            save_file(
                {f"{number}": batch.contiguous().clone() for number, batch in enumerate(batches)}, order.work / _BATCHES
            )
            partial = order.work / f"{_SHARES}.partial"
            partial.write_text(json.dumps({"identity": identity, "shares": numbers}), encoding="utf-8")
            for path in (order.work / _BATCHES, partial):
                sync(path)
            partial.replace(order.work / _SHARES)
            sync(order.work)
    return tuple(
        Share(number, tuple(mine), sum(batches[each].shape[0] for each in mine)) for number, mine in enumerate(numbers)
    )


def is_finished(order: Order, share: Share) -> bool:
    """Whether a share was measured, by this run or an earlier one.

    The folder is listed: of a name that was asked for in vain, a network filesystem says for a while that there is
    nothing. Raises `CalibrationError` where it cannot be.
    """
    with storing("the shares", order.work):
        return _final(order, share) in order.work.iterdir()


def measure_share(order: Order, share: Share, device: str, attempt: str) -> None:
    """Measure a share on a device of this machine, and keep what was seen in the order's work folder.

    ``attempt`` is a name that nobody else has. In resident mode the model stays loaded for the next share. Raises
    `CalibrationError` as `calibration.calibrate.calibrate` does.
    """
    from safetensors import safe_open

    if is_finished(order, share):
        return
    with measuring(order.folder), storing("the shares", order.work):
        own = _taken_over(order, share, attempt)
        with safe_open(order.work / _BATCHES, framework="pt") as stored:
            batches: list[torch.Tensor] = [stored.get_tensor(f"{number}") for number in share.batches]
        if order.mode == "resident":
            measurement = Measurement(order.observation)
            one = _loaded(order.folder, device, order.trust_remote_code)
            run_resident(one, batches, measurement, lambda _: None)
            keep(measurement, own / f"{_WHOLE}.safetensors")
        else:
            _by_layers(order, batches, device, own)
        sync(own)
        try:
            own.rename(_final(order, share))
        except OSError:
            if not is_finished(order, share):
                raise
            shutil.rmtree(own, ignore_errors=True)  # by one that had been taken for lost
        sync(order.work)


def joined(order: Order, shares: Sequence[Share]) -> Found:
    """What the shares saw together. Of a run in layer mode only one layer's summaries are held at a time.

    Raises `CalibrationError` where one of them cannot be seen or read.
    """
    files = [sorted(_final(order, share).glob("*.safetensors")) for share in shares]
    for share, own in zip(shares, files, strict=True):
        if not own:
            raise CalibrationError(f"{_final(order, share)} was measured elsewhere, and cannot be seen here")
    # Shares of an earlier attempt may have been measured in the other mode: then all meet at once.
    alike = len({tuple(path.name for path in own) for own in files}) == 1
    found = Found()
    for parts in zip(*files, strict=True) if alike else [[path for own in files for path in own]]:
        found.add(merged(recall(part, order.observation) for part in parts))
    return found


def _by_layers(order: Order, batches: Sequence[torch.Tensor], device: str, own: Path) -> None:
    one = replica(order.folder, device, trust_remote_code=order.trust_remote_code)
    need, _ = need_of(one, batches)
    activations = activations_for([one], need, order.activation_bytes, own / _LAYERS)
    files = [own / f"{layer:05}.safetensors" for layer in range(len(layer_names(one.model, one.attention.values())))]
    run_layers([one], batches, order.observation, activations, kept=lambda layer, seen: keep(seen, files[layer]))
    if not all(path.is_file() for path in files):
        raise CalibrationError(f"{own}: another attempt has taken over this share")
    shutil.rmtree(own / _LAYERS, ignore_errors=True)


@lru_cache(maxsize=1)
def _loaded(folder: Path, device: str, trust_remote_code: bool) -> Replica:
    return load_resident(folder, device, trust_remote_code=trust_remote_code)


def _taken_over(order: Order, share: Share, attempt: str) -> Path:
    """A folder that is this attempt's alone, with what the furthest of the others had come to in layer mode."""
    own = order.work / f"{_final(order, share).name}.{attempt}"
    others = {path: _come_to(path) for path in order.work.glob(f"{_final(order, share).name}.*")}
    furthest = max(others, key=others.__getitem__, default=None) if order.mode == "layer" else None
    for other, layer in others.items():
        if other == furthest and layer:
            with suppress(OSError):
                other.rename(own)
        else:
            shutil.rmtree(other, ignore_errors=True)
    own.mkdir(exist_ok=True)
    return own


def _come_to(attempt: Path) -> int:
    """The layer that an attempt can be gone on with at; 0 for none.

    One that lost its folder and works on makes another, which lacks what it saw of the layers before.
    """
    kept = {path.stem for path in attempt.glob("*.safetensors")}
    committed = committed_layers(attempt / _LAYERS)
    return next((layer for layer in committed if kept.issuperset(f"{each:05}" for each in range(layer))), 0)


def _final(order: Order, share: Share) -> Path:
    return order.work / f"share-{share.number:05}"


def _split_of(path: Path, identity: str) -> Sequence[Sequence[int]] | None:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        shares: Sequence[Sequence[int]] = facts["shares"]
        return shares if facts["identity"] == identity else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def keep(measurement: Measurement, path: Path) -> None:
    """Write a safetensors file that is on the disk for good then; `CalibrationError` where it cannot be."""
    tables = {"summaries": measurement.summaries, "every": measurement.every}
    # Modules with one input have one summary.
    known = {id(summary): summary for table in tables.values() for summary in table.values()}
    number = {key: f"{index}" for index, key in enumerate(known)}
    facts: dict[str, Any] = {
        name: [[*key, number[id(summary)], f"{summary.dtype}", summary.total.shape] for key, summary in table.items()]
        for name, table in tables.items()
    }
    facts |= {
        "order": [list(key) for key in measurement.order],
        "expert_of": [[*key, expert] for key, expert in measurement.expert_of.items()],
        "tokens": measurement.tokens,
        "routed_only": sorted(measurement.routed_only),
        "batches": measurement.batches,
    }
    with _kept(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {number[key]: _packed(summary.total.cpu()) for key, summary in known.items()}
        save_whole(path, tensors, {"facts": json.dumps(facts)})


def recall(path: Path, observation: Observation) -> Measurement:
    """Read what `keep` wrote; ``observation`` is what it was measured with.

    Raises `CalibrationError` for a file that is not there or holds anything else.
    """
    from safetensors import safe_open

    found = Measurement(observation)
    with _kept(path), safe_open(path, framework="pt") as stored:
        facts: dict[str, Any] = json.loads(stored.metadata()["facts"])
        for table, entries in ((found.summaries, facts["summaries"]), (found.every, facts["every"])):
            for kind, name, number, dtype, shape in entries:
                total = _unpacked(stored.get_tensor(number), shape)
                table[kind, name] = Summary(total, getattr(torch, dtype.removeprefix("torch.")))
        found.order.update(((kind, name), None) for kind, name in facts["order"])
        found.expert_of.update(((kind, name), expert) for kind, name, expert in facts["expert_of"])
        found.tokens.update(facts["tokens"])
        found.routed_only.update(facts["routed_only"])
        found.batches = facts.get("batches", 0)
    return found


def _packed(total: torch.Tensor) -> torch.Tensor:
    """A magnitude as it is; of counts, which are mostly zero, the places of the others with what is there."""
    if total.is_floating_point():
        return total.clone()
    seen = total.nonzero()
    return torch.cat((seen, total[tuple(seen.t())].unsqueeze(1)), dim=1)


def _unpacked(stored: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if stored.is_floating_point():
        return stored
    whole = stored.new_zeros(shape)
    whole[tuple(stored[:, :-1].t())] = stored[:, -1]
    return whole


@contextmanager
def _kept(path: Path) -> Iterator[None]:
    try:
        with storing("the measurement", path):
            yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path}: no measurement of this version: {error!r}") from error
