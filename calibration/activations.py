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
    """States of a batch between two layers: hidden states [batch, sequence, ..., hidden] and carried tensors.

    ``carried`` are, by name, the tensors that layers hand on beside the hidden states: the choice of a sparse indexer,
    keys and values that later layers use again.
    """

    hidden: torch.Tensor
    carried: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return int(self.hidden.nbytes + sum(tensor.nbytes for tensor in self.carried.values()))

    def to(self, device: str) -> States:
        """Return a copy whose tensors lie on ``device``."""
        return States(self.hidden.to(device), {name: tensor.to(device) for name, tensor in self.carried.items()})

    def detached(self) -> States:
        """Return the same tensors outside of autograd's graph."""
        return States(self.hidden.detach(), {name: tensor.detach() for name, tensor in self.carried.items()})

    @classmethod
    def stacked(cls, parts: Sequence[States]) -> States:
        """Stack the states of several models for one batch; each tensor gets a leading dimension [models].

        All ``parts`` must carry the tensors of the first. Index the result to get one model's states back.
        """
        names = parts[0].carried
        carried = {name: torch.stack([part.carried[name] for part in parts]) for name in names}
        return cls(torch.stack([part.hidden for part in parts]), carried)

    def __getitem__(self, number: int) -> States:
        """Return the states of model ``number`` from states made by `stacked`."""
        return States(self.hidden[number], {name: tensor[number] for name, tensor in self.carried.items()})


class Activations:
    """Store of the states of all batches, by batch number, while layers are run one after the other.

    States take at most ``budget`` bytes of memory; others are spilled to ``folder``, which also holds committed states.
    With ``on_device`` the states in memory stay on the device that computed them; else they are moved to the CPU. `put`
    and `set_aside` may be called from several threads.
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
        """Start before the first layer (``layer`` 0), or at a committed ``layer`` with ``count`` states on the disk.

        Spilled states that earlier attempts did not commit are removed. Raises `CalibrationError` where the disk
        refuses.
        """
        self.layer = layer or -1
        with storing("the hidden states", self.folder):
            for stale in self.folder.glob("*.partial"):
                shutil.rmtree(stale)
        self._there = {number: _file(_committed(self.folder, layer), number) for number in range(count)}

    def get(self, number: int, device: str) -> States:
        """Return the states of batch ``number`` that enter the current layer, on ``device``."""
        if number in self._here:
            return self._here[number].to(device)
        return _read(self._there[number]).to(device)

    def put(self, number: int, states: States) -> None:
        """Store the states of batch ``number`` that enter the next layer; those that enter the current layer are freed.

        Raises `CalibrationError` where states must be spilled and cannot be written.
        """
        with self._lock:
            former = self._here.pop(number, None)
            self._used -= 0 if former is None else former.nbytes
        if self._claim(states):
            self._next[number] = states if self._on_device else states.to("cpu")
        else:
            self._next[number] = _write(_file(self._partial(self.layer + 1), number), states)

    def set_aside(self, number: int, states: States, *, spill: bool) -> bool:
        """Store a second set of states of batch ``number`` until `take_aside`; return whether it was stored.

        Where memory has no room left, the states are written to the disk if ``spill`` is set, and not stored otherwise.
        """
        fits = self._claim(states)
        if fits:
            self._aside[number] = states if self._on_device else states.to("cpu")
        elif spill:
            self._aside[number] = _write(self._partial(self.layer + 1) / f"aside-{number:05}.safetensors", states)
        return fits or spill

    def _claim(self, states: States) -> bool:
        """Count states to the memory in use if they fit in the budget; return whether they do."""
        with self._lock:
            fits = self._used + states.nbytes <= self._budget
            self._used += states.nbytes if fits else 0
        return fits

    def has_aside(self, number: int) -> bool:
        """Return whether states of batch ``number`` are set aside."""
        return number in self._aside

    def take_aside(self, number: int, device: str) -> States | None:
        """Remove and return, on ``device``, the states set aside for batch ``number``; None where there are none."""
        states = self._aside.pop(number, None)
        if isinstance(states, Path):
            file, states = states, _read(states)
            file.unlink()
        elif states is not None:
            with self._lock:
                self._used -= states.nbytes
        return None if states is None else states.to(device)

    def spare(self, device: str) -> int:
        """Return the bytes left in the budget for more tensors of ``device``; 0 where states lie on another device."""
        return self._budget - self._used if self._on_device or device.startswith("cpu") else 0

    def advance(self) -> None:
        """Make the next layer the current one: the states that were put become those that enter it."""
        self._here = {number: value for number, value in self._next.items() if not isinstance(value, Path)}
        self._there = {number: value for number, value in self._next.items() if isinstance(value, Path)}
        self._next = {}
        with storing("the hidden states", self.folder):
            shutil.rmtree(self._partial(self.layer), ignore_errors=True)
        self.layer += 1

    def commit(self, identity: str, known: Any) -> None:
        """Commit the states that enter the current layer, with the plain value ``known``, as a point to resume at.

        ``identity`` is the digest that a later run must have to resume there (`digest_of`). Commits of earlier layers
        are removed. Raises `CalibrationError` where the disk refuses.
        """
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
        """Return the last layer committed with this ``identity``, and the value stored with it; (0, None) for none."""
        for layer in committed_layers(self.folder):
            found, known = torch.load(_committed(self.folder, layer) / _STATE, weights_only=True)
            if found == identity:
                return layer, known
        return 0, None

    def _partial(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05}.{self._own}.partial"


def committed_layers(folder: Path) -> list[int]:
    """Return the numbers of the layers that are committed in a folder, the last one first."""
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
    """Within the block, turn `OSError` and `SafetensorError` into `CalibrationError`.

    The message says that ``what`` cannot be kept at ``path``.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"{path}: {what} cannot be kept there: {error}") from error


def save_whole(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata as a safetensors file that appears only when it is complete and flushed to the disk.

    Raises `OSError`.
    """
    from safetensors.torch import save_file

    with whole(path) as partial:
        save_file(dict(tensors), partial, metadata=dict(metadata))


def digest_of(facts: Any, batches: Sequence[torch.Tensor]) -> str:
    """Return the SHA-256, in hex, of JSON-serialisable ``facts`` and of the batches, which a resumed run must share."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for batch in batches:
        digest.update(f"{list(batch.shape)}".encode())
        digest.update(batch.numpy().tobytes())
    return digest.hexdigest()


class Pace:
    """Timer for commits: at the earliest after ``least`` seconds of work, and for at most a tenth of the time.

    With ``least`` 0, every `step` commits.
    """

    def __init__(self, least: float) -> None:
        self._least, self._since, self._took = least, time.monotonic(), 0.0

    def step(self, commit: Callable[[], None]) -> None:
        """Call ``commit`` if enough time has passed since the last commit."""
        began = time.monotonic()
        if began - self._since >= (self._least and max(self._least, 9 * self._took)):
            commit()
            self._since = time.monotonic()
            self._took = self._since - began
