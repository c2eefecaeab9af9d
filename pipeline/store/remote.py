"""A second tier of the store, in a bucket or in a folder that machines share (file://), that several sites share.

    s3://bucket/quantmint/evaluate/3f2a....json                  the parcel, written last
    s3://bucket/quantmint/evaluate/3f2a.../9c01d2e3f4a5b6c7/...    its files

It holds what was measured, not weights: those are made again from the source faster than they travel, to the same
bytes. A fingerprint says what a stage was asked to start from; the content of its inputs says what it found. Both have
to be the same where an entry is taken over: answers of one checkpoint prove nothing of another, nor does one machine's
speed of another kind of machine.

Nothing here can spoil a run: a tier that is away or holds nonsense is told once, and the stage runs. What comes in is
held against its record, file by file, and a record against its fingerprint. Whoever may write to the bucket may write
results, so that right is worth as much as the right to publish.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import QuantmintError, StoreError, UserError
from quantmint.pipeline.base.machine import Device
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.store.entries import Entry, Record
from quantmint.pipeline.store.files import PARTIAL, File, fetch, require_safe
from quantmint.pipeline.store.objects import Objects
from quantmint.pipeline.store.tree import Work

SCHEMA: Final = 1
_FOLDER: Final = re.compile(r"[0-9a-f]{16}")
_WEIGHTS: Final = "checkpoint/"
_SERVED: Final = "serve"
_LAUNCH: Final = "launch.json"
HERE_ONLY: Final = frozenset({"source", "quantize", "publish"})
"""Families that stay: paths of this machine, weights, and what was published from here."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """An entry in the tier: ``folder`` is the name under which its files lie, ``inputs`` the `content` of each input.

    ``device`` is what a server ran on, None for what is no server: what is measured of a server starts from the
    server's entry, so that one knows the device.
    """

    folder: str
    record: Record
    inputs: dict[str, str]
    device: Device | None

    def encode(self) -> bytes:
        """The object's bytes."""
        data = {"schema": SCHEMA, **asdict(self)}
        return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def pack(entry: Entry, inputs: Mapping[str, Entry]) -> Parcel:
    """The parcel of an entry that lies here.

    The folder's name follows from the record, so that two sites which made the same entry do not mix their files.
    """
    device = None
    if entry.stage == _SERVED:
        device = Device(**json.loads(entry.file(_LAUNCH).read_text(encoding="utf-8"))["device"])
    folder = hashlib.sha256(entry.record.to_json()).hexdigest()[:16]
    return Parcel(folder, entry.record, {name: content(one) for name, one in inputs.items()}, device)


def decode(raw: bytes, stage: str, wanted: str) -> Parcel:
    """Read a parcel of the entry ``stage``/``wanted``; raises `ValueError` with the reason for anything else."""
    try:
        data = json.loads(raw)
        if data.pop("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}")
        record = Record.from_json(json.dumps(data.pop("record")).encode())
        require_safe(record.files)
        device = Device(**given) if (given := data.pop("device")) is not None else None
        parcel = Parcel(record=record, device=device, **data)
        named = _FOLDER.fullmatch(parcel.folder) is not None
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has the wrong shape ({error})") from None
    if (record.stage, record.fingerprint) != (stage, wanted):
        raise ValueError(f"it is of {record.stage}/{record.fingerprint[:12]}")
    if not named:
        raise ValueError("its folder is no name of 16 hex digits")
    if (device is None) == (stage == _SERVED):
        raise ValueError("a server's device is missing, or something else has one")
    return parcel


def content(entry: Entry) -> str:
    """SHA-256 in hex of what an entry stands for, the same on every machine.

    A source goes by its fingerprint, a checkpoint by its own files: others tell of the machine that made it.
    """
    if entry.stage == "source":
        return entry.fingerprint
    weights = {name: fact for name, fact in entry.record.files.items() if name.startswith(_WEIGHTS)}
    if entry.stage == "quantize" and weights:
        return fingerprint([[name, fact.sha256, fact.size] for name, fact in sorted(weights.items())])
    return entry.digest


class RemoteTier:
    """A tier of ``objects``; ``warn`` hears each fault once, ``device`` says what a kind ("cpu", "cuda") is here."""

    def __init__(self, objects: Objects, warn: Callable[[str], None], device: Callable[[str], Device]) -> None:
        self.url = objects.url
        self._objects = objects
        self._warn = warn
        self._device = device
        self._told: set[str] = set()
        self._damaged: set[str] = set()
        self._away = False

    def offers(self, stage: str, fingerprint: str) -> bool:
        """Whether an entry can be had; False where the tier cannot be asked."""
        parcel, _ = self._look(stage, fingerprint)
        return parcel is not None and self._measured_as_here(parcel)

    def bring(self, work: Work, inputs: Mapping[str, Entry], progress: Progress) -> Entry | None:
        """Make the entry from what another site sent; None where there is none of these inputs and such a machine.

        What was brought before a break is not brought again.
        """
        parcel, _ = self._look(work.stage, work.fingerprint)
        held = {name: content(one) for name, one in inputs.items()}
        if parcel is None or parcel.inputs != held or not self._measured_as_here(parcel):
            return None
        record = parcel.record
        folder = f"{work.stage}/{work.fingerprint}/{parcel.folder}"
        ours = {*record.files, *(f"{name}{PARTIAL}" for name in record.files)}
        if any(path.relative_to(work.path).as_posix() not in ours for path in work.path.rglob("*") if path.is_file()):
            work.discard()  # what an attempt to make it here left

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return self._objects.pieces(f"{folder}/{name}", start, record.files[name].size)

        progress.say(f"taking it from {self.url}, where it was finished at {record.finished}")
        try:
            fetch(
                work.path,
                {name: fact.size for name, fact in record.files.items()},
                {name: fact.sha256 for name, fact in record.files.items()},
                pieces,
                place=self.url,
                progress=progress,
            )
        except StoreError:
            raise  # this disk's, not the tier's
        except QuantmintError as error:
            self._damaged.add(work.fingerprint)
            self._tell(f"{work.stage} is made here: {error.message}")
            work.discard()
            return None
        return work.adopt(record)

    def send(self, entry: Entry, inputs: Mapping[str, Entry], progress: Progress) -> None:
        """Give an entry to the other sites, where they have none: one that is there and sound stays."""
        there, mark = self._look(entry.stage, entry.fingerprint)
        if entry.stage in HERE_ONLY or self._away or (there is not None and entry.fingerprint not in self._damaged):
            return
        parcel = pack(entry, inputs)
        folder = f"{entry.stage}/{entry.fingerprint}/{parcel.folder}"
        try:
            with progress.bar(sum(fact.size for fact in entry.record.files.values()), "B") as advance:
                for name, fact in entry.record.files.items():
                    file = File(entry.path / name, fact.size, fact.sha256)
                    self._objects.send(f"{folder}/{name}", file, advance)
            self._objects.put_if(f"{entry.stage}/{entry.fingerprint}.json", parcel.encode(), mark)
        except QuantmintError as error:
            self._tell(f"{entry.stage} was not sent to {self.url}: {error.message}")

    def _measured_as_here(self, parcel: Parcel) -> bool:
        there = parcel.device
        return there is None or there == self._device("cpu" if there.hardware == "cpu" else "cuda")

    def _look(self, stage: str, fingerprint: str) -> tuple[Parcel | None, str | None]:
        if stage in HERE_ONLY or self._away:
            return None, None
        try:
            found = self._objects.read(f"{stage}/{fingerprint}.json")
        except QuantmintError as error:
            self._away = True  # asking for each stage anew would cost a timeout each
            self._tell(f"the remote store is left out: {error.message}")
            return None, None
        if found is None:
            return None, None
        try:
            return decode(found.data, stage, fingerprint), found.mark
        except ValueError as error:
            self._tell(f"{self.url}/{stage}/{fingerprint}.json is not used: {error}")
            return None, found.mark

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._warn(message)


def open_tier(url: str, warn: Callable[[str], None], device: Callable[[str], Device]) -> RemoteTier:
    """The tier at a URL, of AWS or AWS_ENDPOINT_URL. `UserError` for no such kind, or credentials in the address."""
    if "@" in url:
        raise UserError("--remote-store: found an address with an @, expected one without credentials")
    return RemoteTier(Objects(url.rstrip("/")), warn, device)
