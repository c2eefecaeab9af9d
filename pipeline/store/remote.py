"""A second tier of the store, in a bucket or in a folder (file://), that several sites share.

    s3://bucket/quantmint/evaluate/3f2a....json                  the parcel, written last
    s3://bucket/quantmint/evaluate/3f2a.../9c01d2e3f4a5b6c7/...    its files

It holds measurements, not weights: making weights again from the source is faster than downloading them, and gives the
same bytes. An entry is taken over only where its fingerprint and the content of its inputs are the same, and a
measurement of a server only on the same kind of device: scores of one checkpoint prove nothing about another.

The tier cannot break a run: if it is unreachable or holds invalid data, one warning says so and the stage runs. Every
file that is downloaded is checked against its record, and the record against its fingerprint. Whoever may write to the
bucket may write results: give that right only to those who may publish.
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
from quantmint.pipeline.store.entries import Entry, EntryRecord
from quantmint.pipeline.store.files import PARTIAL, File, fetch, require_safe
from quantmint.pipeline.store.objects import Objects
from quantmint.pipeline.store.tree import Work

SCHEMA: Final = 1
_FOLDER: Final = re.compile(r"[0-9a-f]{16}")
_WEIGHTS: Final = "checkpoint/"
_SERVED: Final = "serve"
_LAUNCH: Final = "launch.json"
HERE_ONLY: Final = frozenset({"source", "quantize", "publish"})
"""Stages that are never shared: their entries hold local paths, weights, or publications from here."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """An entry as the tier stores it.

    ``folder`` is the name of the folder with its files, ``inputs`` the `content` of each input by its name. ``device``
    is the device of a served process; None for every other stage. Measurements need no device of their own: the entry
    of the server that they start from names it.
    """

    folder: str
    record: EntryRecord
    inputs: dict[str, str]
    device: Device | None

    def encode(self) -> bytes:
        """Return the parcel as UTF-8 JSON, the content of its object."""
        data = {"schema": SCHEMA, **asdict(self)}
        return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def pack(entry: Entry, inputs: Mapping[str, Entry]) -> Parcel:
    """Return the parcel of a local entry; ``inputs`` are the entries that it was made from, by name.

    The folder's name is a digest of the record, so that two sites that made the same entry do not mix their files.
    """
    device = None
    if entry.stage == _SERVED:
        device = Device(**json.loads(entry.file(_LAUNCH).read_text(encoding="utf-8"))["device"])
    folder = hashlib.sha256(entry.record.to_json()).hexdigest()[:16]
    return Parcel(folder, entry.record, {name: content(input_entry) for name, input_entry in inputs.items()}, device)


def decode(raw: bytes, stage: str, expected: str) -> Parcel:
    """Parse the parcel of the entry of ``stage`` with the fingerprint ``expected``.

    Raises `ValueError` with the reason for a parcel of another entry and for invalid data.
    """
    try:
        data = json.loads(raw)
        if data.pop("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}")
        record = EntryRecord.from_json(json.dumps(data.pop("record")).encode())
        require_safe(record.files)
        device = Device(**device_fields) if (device_fields := data.pop("device")) is not None else None
        parcel = Parcel(record=record, device=device, **data)
        named = _FOLDER.fullmatch(parcel.folder) is not None
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has the wrong shape ({error})") from None
    if (record.stage, record.fingerprint) != (stage, expected):
        raise ValueError(f"it is of {record.stage}/{record.fingerprint[:12]}")
    if not named:
        raise ValueError("its folder is no name of 16 hex digits")
    if (device is None) == (stage == _SERVED):
        raise ValueError("a server's device is missing, or something else has one")
    return parcel


def content(entry: Entry) -> str:
    """Return a SHA-256 in hex of an entry's content that is the same on every machine.

    For a source that is its fingerprint; for a checkpoint a digest of the weights' folder, since its other files depend
    on the machine that made them.
    """
    if entry.stage == "source":
        return entry.fingerprint
    weights = {name: fact for name, fact in entry.record.files.items() if name.startswith(_WEIGHTS)}
    if entry.stage == "quantize" and weights:
        return fingerprint([[name, fact.sha256, fact.size] for name, fact in sorted(weights.items())])
    return entry.digest


class RemoteTier:
    """The shared tier in ``objects``.

    ``warn`` is called once for each fault, ``device`` returns this machine's device of a kind ("cpu", "cuda").
    """

    def __init__(self, objects: Objects, warn: Callable[[str], None], device: Callable[[str], Device]) -> None:
        self.url = objects.url
        self._objects = objects
        self._warn = warn
        self._device = device
        self._warned: set[str] = set()
        self._damaged: set[str] = set()
        self._away = False

    def offers(self, stage: str, fingerprint: str) -> bool:
        """Return whether the tier has an entry that this machine can use; False if the tier is unreachable."""
        parcel, _ = self._look(stage, fingerprint)
        return parcel is not None and self._measured_as_here(parcel)

    def bring(self, work: Work, inputs: Mapping[str, Entry], progress: Progress) -> Entry | None:
        """Download an entry and commit it; return None if the tier has none for these inputs and this kind of device.

        Faults of the tier become a warning and None. An interrupted download continues where it stopped. Raises
        `StoreError` for faults of the local disk.
        """
        parcel, _ = self._look(work.stage, work.fingerprint)
        contents = {name: content(input_entry) for name, input_entry in inputs.items()}
        if parcel is None or parcel.inputs != contents or not self._measured_as_here(parcel):
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
            self._warn_once(f"{work.stage} is made here: {error.message}")
            work.discard()
            return None
        return work.adopt(record)

    def send(self, entry: Entry, inputs: Mapping[str, Entry], progress: Progress) -> None:
        """Upload an entry for other sites, unless the tier has a sound one already. Faults become a warning."""
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
            self._warn_once(f"{entry.stage} was not sent to {self.url}: {error.message}")

    def _measured_as_here(self, parcel: Parcel) -> bool:
        there = parcel.device
        return there is None or there == self._device("cpu" if there.hardware == "cpu" else "cuda")

    def _look(self, stage: str, fingerprint: str) -> tuple[Parcel | None, str | None]:
        if stage in HERE_ONLY or self._away:
            return None, None
        try:
            response = self._objects.read(f"{stage}/{fingerprint}.json")
        except QuantmintError as error:
            self._away = True  # asking for each stage anew would cost a timeout each
            self._warn_once(f"the remote store is left out: {error.message}")
            return None, None
        if response is None:
            return None, None
        try:
            return decode(response.data, stage, fingerprint), response.mark
        except ValueError as error:
            self._warn_once(f"{self.url}/{stage}/{fingerprint}.json is not used: {error}")
            return None, response.mark

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)


def open_tier(url: str, warn: Callable[[str], None], device: Callable[[str], Device]) -> RemoteTier:
    """Return the tier at a URL. Raises `UserError` for an unknown kind of URL or credentials in the address."""
    if "@" in url:
        raise UserError("--remote-store: found an address with an @, expected one without credentials")
    return RemoteTier(Objects(url.rstrip("/")), warn, device)
