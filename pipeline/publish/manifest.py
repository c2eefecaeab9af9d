"""``quantmint.json``: what a release is, what it was made from and how, and the digest of every file beside it.

It is what everything else of a release is held against, so reading is strict: a key too many, a type that is wrong or a
name that leads out of the folder is one error, and nothing of it is used. That it agrees with itself is a question of
its own (`contradictions`), whose answers `quantmint release verify` names one by one.

It names no user, host or path: payloads hold content, by digest or by commit.
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
from quantmint.pipeline.store.files import DamagedError, File, OtherBytesError, Wanted, require_safe

SCHEMA: Final = 1
LARGEST: Final = 1 << 26  # bytes; a release of ten thousand files has a manifest of two million

_NEEDED = ("source", "quantize", "inspect", "gate", "report")
_STRICT = ConfigDict(extra="forbid", strict=True)
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
_Moment = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")]
_Text = Annotated[str, StringConstraints(min_length=1)]


class ManifestError(UserError):
    """A file that is no ``quantmint.json`` of this schema, or not a safe one."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Bytes and SHA-256 in hex of a file."""

    __pydantic_config__ = _STRICT
    size: Annotated[int, Field(ge=0)]
    sha256: _Sha256


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The 16-bit model: a repository at a commit, or a folder by its digest; ``files`` are SHA-256 by name."""

    __pydantic_config__ = _STRICT
    repo: _Text | None
    commit: _Commit | None
    sha256: _Sha256 | None
    files: Mapping[str, _Sha256]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage's record: ``payload`` whole, so that its fingerprint recomputes; times are ISO 8601 in UTC."""

    __pydantic_config__ = _STRICT
    fingerprint: _Sha256
    version: int
    started: _Moment
    finished: _Moment
    tools: Mapping[str, str]
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """Data that shaped the ranges or the verdict.

    ``revision`` is a commit of the Hub; ``sha256`` the digest of a file, or of the names and digests of several.
    """

    __pydantic_config__ = _STRICT
    role: Literal["calibration", "evaluation"]
    name: _Text
    revision: str | None
    sha256: _Sha256 | None


@dataclass(frozen=True, slots=True)
class ServingRecord:
    """What answered: the runtime with its version, and the digest of its container (None outside one)."""

    __pydantic_config__ = _STRICT
    engine: str
    image: str | None


@dataclass(frozen=True, slots=True)
class HardwareRecord:
    """Names of devices: where the checkpoint was computed, where it was measured, what the recipe is meant for."""

    __pydantic_config__ = _STRICT
    quantized_on: str | None
    measured_on: str
    target: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``quantmint.json``.

    ``artefact`` is the digest of the checkpoint's files as the gate recorded it; ``created`` when the gate had judged;
    ``recipe`` the resolved recipe without where it goes, ``tools`` the versions of all stages (several of one tool,
    where stages were made at different times, are joined by ", "); ``files`` everything but the manifest itself and
    the signature; ``quantmint`` the version that assembled the release.
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
    """The bytes of ``quantmint.json``, the same for the same content. Raises `ManifestError` where `decode` would."""
    text = json.dumps(asdict(manifest), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    raw = f"{text}\n".encode()
    decode(raw, what="the manifest to be written")
    return raw


def read(path: Path) -> Manifest:
    """Read a manifest. Raises `ManifestError`."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ManifestError(f"{path}: found {size:,} bytes, expected at most {LARGEST:,}")
        return decode(path.read_bytes(), what=str(path))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None


def decode(raw: bytes, *, what: str = "quantmint.json") -> Manifest:
    """Read a manifest from its bytes; ``what`` is what an error calls it. Raises `ManifestError`."""
    try:
        if (found := strict_object(raw).get("schema")) != SCHEMA:
            raise ValueError(f"found schema {found!r}, this version of quantmint reads {SCHEMA}")
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
    """The identity of a release: SHA-256 in hex of the bytes of its ``quantmint.json``."""
    return hashlib.sha256(raw).hexdigest()


def digests(files: Mapping[str, File]) -> dict[str, FileDigest]:
    """What a manifest says of files, by their names in the release; itself and the signature are left out."""
    return {name: FileDigest(file.size, file.sha256) for name, file in sorted(files.items()) if name not in UNLISTED}


DAMAGED: Final = "What readers get stays as it is. Publish the release again, or choose another one."
"""What to do about a release that is not what it was."""


def require_sizes(raw: bytes, sizes: Mapping[str, int], place: str) -> None:
    """Raise `DamagedError` where what lies there, by ``sizes`` in bytes, is not what its manifest lists."""
    for name, file in decode(raw, what=f"{place}/{MANIFEST}").files.items():
        if sizes.get(name) != file.size:
            found = f"found {sizes[name]:,} bytes" if name in sizes else "it is missing"
            raise DamagedError(f"{place} is damaged: {name}: {found}, expected {file.size:,} bytes", hint=DAMAGED)


def expected_files(
    raw: bytes, present: Mapping[str, int], place: str, wanted: Wanted = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes and digests of the files that a release is to be fetched as, its manifest last.

    ``present`` are the bytes of what lies there: of the signature nobody knows a digest, and what is no file of the
    release, but wanted, is an `OtherBytesError`, as a reader would load whatever weights lie there.
    """
    files = decode(raw, what=f"{place}/{MANIFEST}").files
    sizes = {name: file.size for name, file in files.items()}
    sizes |= {name: present[name] for name in (SIGNATURE,) if name in present}
    sizes[MANIFEST] = len(raw)
    strays = [name for name in sorted(present.keys() - sizes.keys()) if wanted is None or wanted(name)]
    if strays:
        raise OtherBytesError(
            f"{place}: {strays[0]} is no file of the release", hint="Publishing the release again removes it."
        )
    return sizes, {name: file.sha256 for name, file in files.items()} | {MANIFEST: identity(raw)}


def contradictions(manifest: Manifest) -> tuple[str, ...]:
    """Where a manifest does not agree with itself, one sentence each; empty for one that does.

    Fingerprints are recomputed, inputs followed, and what the gate's inputs say of base and recipe is compared.
    """
    found: list[str] = []
    if fingerprint(manifest.recipe) != manifest.recipe_fingerprint:
        found.append("recipe_fingerprint is not the fingerprint of the recipe")
    known = {made.fingerprint for made in manifest.stages.values()}
    used: dict[str, set[str]] = {}
    for key, made in manifest.stages.items():
        if fingerprint(made.payload) != made.fingerprint:
            found.append(f"stages.{key}.fingerprint is not the fingerprint of its payload")
        used[key] = set(made.payload["inputs"].values())
        if not used[key] <= known:
            found.append(f"stages.{key} was made from a stage that is not listed")
        if made.version != made.payload["version"]:
            found.append(f"stages.{key}.version is not that of its payload")
    for key in _NEEDED:
        if key not in manifest.stages:
            found.append(f"stages lacks {key}")
        elif key != "report" and manifest.stages[key].fingerprint not in used.get("report", ()):
            found.append(f"the report does not rest on stage {key}")
    if "gate" in manifest.stages and manifest.stages["gate"].finished != manifest.created:
        found.append("created is not when the gate had judged")
    if "source" in manifest.stages:
        base = manifest.base
        named = {"sha256": base.sha256} if base.repo is None else {"repo": base.repo, "commit": base.commit}
        if manifest.stages["source"].payload["settings"] != named:
            found.append("base is not what the stage source was given")
    if manifest.recipe["name"] != manifest.name:
        found.append("name is not that of the recipe")
    return tuple(found)


def strict_object(raw: bytes) -> dict[str, Any]:
    """One JSON object whose keys are all different: of two alike readers take different ones. Raises `ValueError`."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"found the key {max(keys, key=keys.count)!r} twice in one object")
        return found

    def no_number(text: str) -> NoReturn:
        raise ValueError(f"found {text}, which JSON has no number for")

    try:
        data = json.loads(raw, object_pairs_hook=once, parse_constant=no_number)
    except RecursionError as error:
        raise ValueError(f"found too deep a nesting: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("found no JSON object")
    return data


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong, with its place and what was found there, on one line."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(map(str, fault["loc"])) or "the whole"
    shown = repr(fault.get("input"))
    return f"{place}: found {shown if len(shown) <= 60 else shown[:60] + '...'}: {fault['msg']}"
