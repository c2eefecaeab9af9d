"""What names an entry in the remote tier: its record, where its files lie, and what it was made from, by content.

    {"schema": 1, "folder": "3f1c0a52d8e07b11", "record": {...}, "inputs": {"serve": "<sha256>", "model": "<sha256>"},
     "device": {"hardware": "mi300x", "name": "AMD Instinct MI300X"}}

A fingerprint says what a stage was asked to start from; the content of its inputs says what it found. Both have to be
the same where an entry is taken over: answers of one checkpoint prove nothing of another, nor does one machine's speed
of another kind of machine. What is measured of a server starts from the server's entry, so that one knows the device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.base.canonical import fingerprint
from pipeline.base.machine import Device
from pipeline.store.entries import FINGERPRINT, Entry, Record
from pipeline.store.files import require_safe

SCHEMA: Final = 1
_KEYS: Final = {"schema", "folder", "record", "inputs", "device"}
_WEIGHTS: Final = "checkpoint/"
_SERVED: Final = "serve"
_LAUNCH: Final = "launch.json"


class ParcelError(ValueError):
    """An object that is no parcel of this schema, or not the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """``folder`` is the name under which the files lie; ``inputs`` maps each input to `content` of its entry.

    ``device`` is what a server ran on; None for what is no server.
    """

    folder: str
    record: Record
    inputs: Mapping[str, str]
    device: Device | None

    def encode(self) -> bytes:
        """The object's bytes."""
        record = json.loads(self.record.to_json())
        data = {
            "schema": SCHEMA,
            "folder": self.folder,
            "record": record,
            "inputs": dict(self.inputs),
            "device": None if self.device is None else self.device.to_json(),
        }
        return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def pack(entry: Entry, inputs: Mapping[str, Entry]) -> Parcel:
    """The parcel of an entry that lies here.

    The folder's name follows from the record, so that two sites which made the same entry do not mix their files.
    """
    folder = hashlib.sha256(entry.record.to_json()).hexdigest()[:16]
    return Parcel(folder, entry.record, contents(inputs), _device(entry))


def decode(raw: bytes, stage: str, wanted: str) -> Parcel:
    """Read a parcel of the entry ``stage``/``wanted``; raises `ParcelError` with the reason for anything else."""
    try:
        data: Any = json.loads(raw)
        if not isinstance(data, dict) or data.keys() != _KEYS:
            raise ParcelError(f"expected a mapping of {', '.join(sorted(_KEYS))}")
        if data["schema"] != SCHEMA:
            raise ParcelError(f"found schema {data['schema']!r}, expected {SCHEMA}")
        record = Record.from_json(json.dumps(data["record"]).encode())
        require_safe(record.files)
        device = None if data["device"] is None else Device(**data["device"])
    except ParcelError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise ParcelError(str(error)) from None
    if (record.stage, record.fingerprint) != (stage, wanted):
        raise ParcelError(f"it is of {record.stage}/{record.fingerprint[:12]}")
    folder, inputs = data["folder"], data["inputs"]
    if not isinstance(folder, str) or len(folder) != 16 or not set(folder) <= set("0123456789abcdef"):
        raise ParcelError("its folder is no name of 16 hex digits")
    if not isinstance(inputs, dict) or inputs.keys() != record.inputs.keys():
        raise ParcelError("its inputs are not those of its record")
    if not all(isinstance(value, str) and FINGERPRINT.fullmatch(value) for value in inputs.values()):
        raise ParcelError("its inputs are not told by digest")
    if (device is None) == (stage == _SERVED):
        raise ParcelError("a server's device is missing, or something else has one")
    return Parcel(folder, record, inputs, device)


def contents(inputs: Mapping[str, Entry]) -> dict[str, str]:
    """What the inputs of a stage hold."""
    return {name: content(entry) for name, entry in inputs.items()}


def content(entry: Entry) -> str:
    """SHA-256 in hex of what an entry stands for, the same on every machine.

    A source's fingerprint is of its files or its commit already, and a checkpoint counts by its own files: what lies
    beside them tells of the machine that made it.
    """
    if entry.stage == "source":
        return entry.fingerprint
    weights = {name: fact for name, fact in entry.record.files.items() if name.startswith(_WEIGHTS)}
    if entry.stage == "quantize" and weights:
        return fingerprint([[name, fact.sha256, fact.size] for name, fact in sorted(weights.items())])
    return entry.digest


def _device(entry: Entry) -> Device | None:
    """What the server of an entry ran on."""
    if entry.stage != _SERVED:
        return None
    return Device(**json.loads(entry.file(_LAUNCH).read_text(encoding="utf-8"))["device"])
