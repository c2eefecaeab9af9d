"""The small objects beside the releases of a bucket: which is current, which waits, and which are complete.

    current.json, candidate.json, chosen.json, left.v20261120-77aa01be.json, v20261121-3f1c0a52.json

    {"schema": 1, "tag": "v20261121-3f1c0a52", "identity": "3f1c0a52...", "title": "...", "created": "...", "size": 1}

One of a release's own name is written when its publication is over: what has none was not finished. ``chosen.json``
names the release that a run made the current one; a promotion and a rollback remove it. ``left.`` stands before one
that a person went back from.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from pipeline.publish.wholeness import DamagedError

CURRENT: Final = "current.json"
CANDIDATE: Final = "candidate.json"
CHOSEN: Final = "chosen.json"
LEFT: Final = "left."
_SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Pointer:
    """A release by its tag and identity, and what lists say of it; ``created`` is ISO 8601, ``size`` in bytes."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    tag: Annotated[str, StringConstraints(pattern=r"^v\d{8}-[0-9a-f]{8}$")]
    identity: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    title: str
    created: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)$")]
    size: Annotated[int, Field(ge=0)]
    schema: Annotated[int, Field(ge=_SCHEMA, le=_SCHEMA)] = _SCHEMA


_ADAPTER: Final = TypeAdapter(Pointer)


def encode(pointer: Pointer) -> bytes:
    """The bytes of a pointer, the same for the same release."""
    return (json.dumps(asdict(pointer), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def decode(data: bytes, what: str) -> Pointer:
    """Read a pointer; ``what`` is what an error calls it. Raises `DamagedError`."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the whole"
        raise DamagedError(
            f"{what} is no pointer to a release: {place}: {fault['msg']}",
            hint="Was it written by something else than quantmint, or by a newer one?",
        ) from None
