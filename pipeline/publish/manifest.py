"""``quantmint.json``, the manifest of a release: its source model, its stages, and the digest of every file beside it.

All checks of a release compare with the manifest, so reading is strict: an unknown key, a wrong type or a name that
leads out of the folder is an error, and nothing of the file is used. `contradictions` checks that a manifest agrees
with itself; `quantmint release verify` reports each of its sentences.

It names no user, host or path: payloads name content by digest or by commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE, UNLISTED
from quantmint.pipeline.store.files import DamagedError, File, OtherBytesError, Selection, require_safe

SCHEMA: Final = 1
LARGEST: Final = 1 << 26  # bytes; a release of ten thousand files has a manifest of two million

_NEEDED = ("source", "quantize", "inspect", "gate", "report")
_STRICT = ConfigDict(extra="forbid", strict=True)
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
_Moment = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")]
_Text = Annotated[str, StringConstraints(min_length=1)]


class ManifestError(UserError):
    """A file that is no ``quantmint.json`` of this schema, or that names unsafe paths."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size in bytes and the SHA-256 in hex of a file."""

    __pydantic_config__ = _STRICT
    size: Annotated[int, Field(ge=0)]
    sha256: _Sha256


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The 16-bit source model: a repository at a commit, or a folder by its digest; ``files`` are SHA-256 by name."""

    __pydantic_config__ = _STRICT
    repo: _Text | None
    commit: _Commit | None
    sha256: _Sha256 | None
    files: Mapping[str, _Sha256]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage's record. ``payload`` is complete, so its fingerprint can be recomputed; times are ISO 8601 in UTC."""

    __pydantic_config__ = _STRICT
    fingerprint: _Sha256
    version: int
    started: _Moment
    finished: _Moment
    tools: Mapping[str, str]
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """A data set behind the calibration ranges or the verdict.

    ``revision`` is a commit of the Hub; ``sha256`` the digest of a file, or of the names and digests of several.
    """

    __pydantic_config__ = _STRICT
    role: Literal["calibration", "evaluation"]
    name: _Text
    revision: str | None
    sha256: _Sha256 | None


@dataclass(frozen=True, slots=True)
class ServingRecord:
    """The serving runtime with its version, and the digest of its container image (None outside a container)."""

    __pydantic_config__ = _STRICT
    engine: str
    image: str | None


@dataclass(frozen=True, slots=True)
class HardwareRecord:
    """Names of devices: of the quantization, of the measurements, and of the recipe's target."""

    __pydantic_config__ = _STRICT
    quantized_on: str | None
    measured_on: str
    target: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``quantmint.json``.

    ``artefact`` is the digest of the checkpoint's files in the gate's record; ``created`` the time of the judgement;
    ``recipe`` the resolved recipe without its destinations; ``tools`` the versions of all stages' tools (different
    versions of one tool are joined by ", "); ``files`` all files but the manifest itself and the signature;
    ``quantmint`` the version that assembled the release.
    """

    __pydantic_config__ = _STRICT
    name: _Text
    title: str
    created: _Moment
    artefact: _Sha256
    verdict: Literal["PASS"]
    base: SourceRecord
    recipe: Mapping[str, Any]
    recipe_fingerprint: _Sha256
    stages: Mapping[str, StageRecord]
    datasets: tuple[DatasetRecord, ...]
    tools: Mapping[str, str]
    serving: ServingRecord
    hardware: HardwareRecord
    files: Mapping[str, FileDigest]
    quantmint: str
    schema: Literal[1] = 1


_ADAPTER: Final = TypeAdapter(Manifest)


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of ``quantmint.json``, equal for equal content. Raises `ManifestError` when `decode` would."""
    text = json.dumps(asdict(manifest), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    raw = f"{text}\n".encode()
    decode(raw, what="the manifest to be written")
    return raw


def read(path: Path) -> Manifest:
    """Read a manifest from a file. Raises `ManifestError`."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ManifestError(f"{path}: found {size:,} bytes, expected at most {LARGEST:,}")
        return decode(path.read_bytes(), what=str(path))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None


def decode(raw: bytes, *, what: str = "quantmint.json") -> Manifest:
    """Parse a manifest. Raises `ManifestError`, which calls it ``what``."""
    try:
        if (schema := strict_object(raw).get("schema")) != SCHEMA:
            raise ValueError(f"found schema {schema!r}, this version of quantmint reads {SCHEMA}")
        manifest = _ADAPTER.validate_json(raw)
        require_safe([*manifest.files, *manifest.base.files])
        listed = [name for name in UNLISTED if name in manifest.files]
        if listed:
            raise ValueError(f"files lists {listed[0]}, which cannot have a digest in it")
    except ValidationError as error:
        raise ManifestError(f"{what}: {first_fault(error)}") from None
    except ValueError as error:
        raise ManifestError(f"{what}: {error}") from None
    return manifest


def identity(raw: bytes) -> str:
    """Return the identity of a release: the SHA-256 in hex of the bytes of its ``quantmint.json``."""
    return hashlib.sha256(raw).hexdigest()


def digests(files: Mapping[str, File]) -> dict[str, FileDigest]:
    """Return the manifest's entries of files by name, without the manifest itself and the signature."""
    return {name: FileDigest(file.size, file.sha256) for name, file in sorted(files.items()) if name not in UNLISTED}


DAMAGED: Final = "What readers get stays as it is. Publish the release again, or choose another one."
"""The hint for a damaged release."""


def require_sizes(raw: bytes, sizes: Mapping[str, int], address: str) -> None:
    """Raise `DamagedError` if a file of the manifest is absent at a destination or has another size there.

    ``raw`` are the manifest's bytes, ``sizes`` the sizes in bytes at the destination by name. Raises `ManifestError`
    for an invalid manifest.
    """
    for name, file in decode(raw, what=f"{address}/{MANIFEST}").files.items():
        if sizes.get(name) != file.size:
            actual = f"found {sizes[name]:,} bytes" if name in sizes else "it is missing"
            raise DamagedError(f"{address} is damaged: {name}: {actual}, expected {file.size:,} bytes", hint=DAMAGED)


def expected_files(
    raw: bytes, present: Mapping[str, int], address: str, select: Selection = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Return sizes and SHA-256 by name of the files to fetch for a release, the manifest last.

    ``raw`` are the bytes of its manifest, ``present`` the sizes of the files at the destination, whose ``address``
    errors name. A signature that is there has a size but no digest, since the manifest cannot list it. Raises
    `OtherBytesError` for a file at the destination that the manifest does not list, because a server would load any
    weights in the folder; ``select`` limits this check to the names that it returns True for, not the result.
    """
    files = decode(raw, what=f"{address}/{MANIFEST}").files
    sizes = {name: file.size for name, file in files.items()}
    sizes |= {name: present[name] for name in (SIGNATURE,) if name in present}
    sizes[MANIFEST] = len(raw)
    strays = [name for name in sorted(present.keys() - sizes.keys()) if select is None or select(name)]
    if strays:
        raise OtherBytesError(
            f"{address}: {strays[0]} is no file of the release", hint="Publishing the release again removes it."
        )
    return sizes, {name: file.sha256 for name, file in files.items()} | {MANIFEST: identity(raw)}


def contradictions(manifest: Manifest) -> tuple[str, ...]:
    """Return a sentence for each contradiction within a manifest.

    Recomputes the fingerprints, follows the inputs of stages, and compares base, recipe and time with the stages.
    """
    sentences: list[str] = []
    if fingerprint(manifest.recipe) != manifest.recipe_fingerprint:
        sentences.append("recipe_fingerprint is not the fingerprint of the recipe")
    fingerprints = {stage.fingerprint for stage in manifest.stages.values()}
    inputs: dict[str, set[str]] = {}
    for key, stage in manifest.stages.items():
        if fingerprint(stage.payload) != stage.fingerprint:
            sentences.append(f"stages.{key}.fingerprint is not the fingerprint of its payload")
        inputs[key] = set(stage.payload["inputs"].values())
        if not inputs[key] <= fingerprints:
            sentences.append(f"stages.{key} was made from a stage that is not listed")
        if stage.version != stage.payload["version"]:
            sentences.append(f"stages.{key}.version is not that of its payload")
    for key in _NEEDED:
        if key not in manifest.stages:
            sentences.append(f"stages lacks {key}")
        elif key != "report" and manifest.stages[key].fingerprint not in inputs.get("report", ()):
            sentences.append(f"the report does not rest on stage {key}")
    if "gate" in manifest.stages and manifest.stages["gate"].finished != manifest.created:
        sentences.append("created is not when the gate had judged")
    if "source" in manifest.stages:
        base = manifest.base
        settings = {"sha256": base.sha256} if base.repo is None else {"repo": base.repo, "commit": base.commit}
        if manifest.stages["source"].payload["settings"] != settings:
            sentences.append("base is not what the stage source was given")
    if manifest.recipe["name"] != manifest.name:
        sentences.append("name is not that of the recipe")
    return tuple(sentences)


def strict_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object without duplicate keys, of which readers would take different ones. Raises `ValueError`."""

    def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
        items = dict(pairs)
        if len(items) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"found the key {max(keys, key=keys.count)!r} twice in one object")
        return items

    def refuse_constant(text: str) -> NoReturn:
        raise ValueError(f"found {text}, which JSON has no number for")

    try:
        data = json.loads(raw, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError(f"found too deep a nesting: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("found no JSON object")
    return data


def first_fault(error: ValidationError) -> str:
    """Return the first validation error in one line, with its path and the value there."""
    fault = error.errors(include_url=False)[0]
    path = ".".join(map(str, fault["loc"])) or "the whole"
    shown = repr(fault.get("input"))
    return f"{path}: found {shown if len(shown) <= 60 else shown[:60] + '...'}: {fault['msg']}"
