"""Records: frozen dataclasses that are written as JSON and read back, each value of the type that its field declares.

    @dataclass(frozen=True, slots=True)
    class Machine(Record):
        clock_mhz: float | None = None

    Machine.from_json({"clock_mhz": 1980.0}).to_json()

A record may come from anywhere, so reading is strict: no unknown field, no text for a number, no NaN (which compares
as neither within a limit nor beyond it). `pydantic` checks and converts; making a record in a program checks nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from eval.errors import MeasurementError

if TYPE_CHECKING:
    from typing import Self

    from pydantic import ConfigDict, TypeAdapter


class Record:
    """The base of all records; an enumeration is its value in JSON."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

    def to_json(self) -> dict[str, Any]:
        """A mapping of the fields: what `json.dumps` takes."""
        return asdict(self, dict_factory=_plain)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read back what `to_json` wrote; `MeasurementError` that names the field for anything else."""
        from pydantic import ValidationError

        try:
            read: Self = validated(cls, data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"{part}: " for part in (".".join(map(str, first["loc"])),) if part)
            found = f", found {first['input']!r:.80}"
            raise MeasurementError(f"not a {cls.__name__}: {place}{first['msg']}{found}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise MeasurementError(f"not a {cls.__name__}: {error}") from error
        return read


def validated(kind: Any, data: Any) -> Any:
    """Data as a record of a kind; pydantic's `ValidationError`, or `TypeError` and `ValueError` for what is no JSON."""
    return _adapter(kind).validate_json(json.dumps(data))


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in fields}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
