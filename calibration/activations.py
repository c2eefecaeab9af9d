"""Hidden states of all batches between two layers: in memory within a budget, the rest on disk.

    layer-00007/                the states that enter layer 7, with what is known of the layers before it: committed
    layer-00009.1f3a.partial/   states that were spilled, of no use to another process

A folder is committed by renaming it, when all that it holds has been synced. Whoever comes next goes on there.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantmint.calibration.durable import fsync, whole
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.lazy import torch

_COMMITTED = re.compile(r"layer-(\d{5})")
_STATE = "state.pt"
_HIDDEN = "hidden"  # the name of the hidden states in a file; JSON lists are those of what is carried beside them


@dataclass(frozen=True, slots=True)
class States:
    """A batch between two layers: hidden states [batch, sequence, ..., hidden], and tensors that layers hand on
    beside them, by name: the choice of a sparse indexer, keys and values that later layers use again."""

    hidden: torch.Tensor
    carried: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.hidden.nbytes + sum(tensor.nbytes for tensor in self.carried.values()))

    def to(self, device: str) -> States:
        """Return the same on a device."""
        return States(self.hidden.to(device), {name: tensor.to(device) for name, tensor in self.carried.items()})

    @classmethod
    def stacked(cls, parts: Sequence[States]) -> States:
        """Return the states of several models on the same batch in one, each tensor with a dimension in front."""
        names = parts[0].carried
        carried = {name: torch.stack([part.carried[name] for part in parts]) for name in names}
        return cls(torch.stack([part.hidden for part in parts]), carried)

    def __getitem__(self, number: int) -> States:
        """Return those of one model that were `stacked`."""
        return States(self.hidden[number], {name: tensor[number] for name, tensor in self.carried.items()})


class Activations:
    """States by the number of their batch, layer after layer.

    ``budget`` are the bytes of states that may lie in memory; others are spilled to ``folder``, where states are
    committed too. ``on_device``: those in memory stay on the device that computed them. Several threads may put.
    """

    def __init__(self, folder: Path, budget: int, *, on_device: bool = False) -> None:
        self.folder, self._budget, self._on_device = folder, budget, on_device
        self.layer = -1
        self._here: dict[int, States] = {}
        self._there: dict[int, Path] = {}
        self._next: dict[int, States | Path] = {}
        self._aside: dict[int, States | Path] = {}
        self._used, self._lock = 0, threading.Lock()
        # Two attempts at once, of which one was taken for lost, never write the same file.
        self._own = secrets.token_hex(4)

    def start(self, layer: int = 0, count: int = 0) -> None:
        """Begin before the first layer is entered, or with the ``count`` states of a committed one.

        What earlier attempts spilled and did not commit is removed.
        """
        self.layer = layer or -1
        with storing("the hidden states", self.folder):
            for stale in self.folder.glob("*.partial"):
                shutil.rmtree(stale)
        self._there = {number: _file(_committed(self.folder, layer), number) for number in range(count)}

    def get(self, number: int, device: str) -> States:
        """Return the states of a batch that enter the layer at hand."""
        if number in self._here:
            return self._here[number].to(device)
        return _read(self._there[number]).to(device)

    def put(self, number: int, states: States) -> None:
        """Take the states of a batch that enter the next layer; those that it had are not needed any more."""
        with self._lock:
            former = self._here.pop(number, None)
            self._used -= 0 if former is None else former.nbytes
            fits = self._used + states.nbytes <= self._budget
            self._used += states.nbytes if fits else 0
        if fits:
            self._next[number] = states if self._on_device else states.to("cpu")
        else:
            self._next[number] = _write(_file(self._partial(self.layer + 1), number), states)

    def set_aside(self, number: int, states: States, *, spill: bool) -> bool:
        """Keep other states of a batch until `take_aside`; where there is no room, on the disk if they may ``spill``.

        Return whether they are kept.
        """
        with self._lock:
            fits = self._used + states.nbytes <= self._budget
            self._used += states.nbytes if fits else 0
        if fits:
            self._aside[number] = states if self._on_device else states.to("cpu")
        elif spill:
            self._aside[number] = _write(self._partial(self.layer + 1) / f"aside-{number:05}.safetensors", states)
        return fits or spill

    def has_aside(self, number: int) -> bool:
        """Whether states of a batch are set aside."""
        return number in self._aside

    def take_aside(self, number: int, device: str) -> States | None:
        """Remove and return the states of a batch that were set aside; None where none are."""
        states = self._aside.pop(number, None)
        if isinstance(states, Path):
            file, states = states, _read(states)
            file.unlink()
        elif states is not None:
            with self._lock:
                self._used -= states.nbytes
        return None if states is None else states.to(device)

    def spare(self, device: str) -> int:
        """Bytes of what a device makes that may lie beside the states, and stay where they are."""
        return self._budget - self._used if self._on_device or device.startswith("cpu") else 0

    def advance(self) -> None:
        """Go on to the next layer."""
        self._here = {number: value for number, value in self._next.items() if not isinstance(value, Path)}
        self._there = {number: value for number, value in self._next.items() if isinstance(value, Path)}
        self._next = {}
        with storing("the hidden states", self.folder):
            shutil.rmtree(self._partial(self.layer), ignore_errors=True)
        self.layer += 1

    def commit(self, identity: str, known: Any) -> None:
        """Make the states that enter the layer at hand a place to resume at, with what else is ``known`` there."""
        partial, committed = self._partial(self.layer), _committed(self.folder, self.layer)
        if committed.exists():
            return
        with storing("the hidden states", self.folder):
            partial.mkdir(parents=True, exist_ok=True)
            for number, states in self._here.items():
                _write(_file(partial, number), states)
            torch.save((identity, known), partial / _STATE)
            for path in (*partial.iterdir(), partial):
                fsync(path)
            partial.rename(committed)
            fsync(self.folder)
            self._there = {number: _file(committed, number) for number in self._there}
            for layer in committed_layers(self.folder):
                if layer < self.layer:
                    shutil.rmtree(_committed(self.folder, layer))

    def last_commit(self, identity: str) -> tuple[int, Any]:
        """The layer to go on at, with what was known there; 0 where none was committed with that identity."""
        for layer in committed_layers(self.folder):
            found, known = torch.load(_committed(self.folder, layer) / _STATE, weights_only=True)
            if found == identity:
                return layer, known
        return 0, None

    def _partial(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05}.{self._own}.partial"


def committed_layers(folder: Path) -> list[int]:
    """Layers at which a folder can be resumed, the last one first."""
    found = [_COMMITTED.fullmatch(path.name) for path in folder.glob("layer-*")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _committed(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:05}"


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def _read(path: Path) -> States:
    from safetensors.torch import load_file

    with storing("the hidden states", path):
        tensors = load_file(path)
        return States(tensors.pop(_HIDDEN), tensors)


def _write(path: Path, states: States) -> Path:
    from safetensors.torch import save_file

    with storing("the hidden states", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {_HIDDEN: states.hidden, **states.carried}
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    return path


@contextmanager
def storing(what: str, path: Path) -> Iterator[None]:
    """Turn what a disk refuses in the block into `CalibrationError`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"{path}: {what} cannot be kept there: {error}") from error


def save_whole(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that is there when it is whole, and on the disk for good. Raises `OSError`."""
    from safetensors.torch import save_file

    with whole(path) as partial:
        save_file(dict(tensors), partial, metadata=dict(metadata))


def digest_of(facts: Any, batches: Sequence[torch.Tensor]) -> str:
    """SHA-256, hex, of plain values and of batches: what must be equal for a run to be gone on with."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for batch in batches:
        digest.update(f"{list(batch.shape)}".encode())
        digest.update(batch.numpy().tobytes())
    return digest.hexdigest()


class Pace:
    """Commits now and then: after ``least`` seconds of work, and in a tenth of the time at most."""

    def __init__(self, least: float) -> None:
        self._least, self._since, self._took = least, time.monotonic(), 0.0

    def step(self, commit: Callable[[], None]) -> None:
        """Call ``commit`` where it is time for it."""
        began = time.monotonic()
        if began - self._since >= (self._least and max(self._least, 9 * self._took)):
            commit()
            self._since = time.monotonic()
            self._took = self._since - began
