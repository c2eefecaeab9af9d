"""The base class of a recipe's sections, and what their fields share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

PRINTABLE = r"^[^\x00-\x1f]+$"
"""Pattern of paths and addresses: they cannot hold control characters."""


def wrong(expected: str, *, actual: str = "", at: str = "") -> PydanticCustomError:
    """Return the error of a validation rule, for pydantic to raise; ``expected`` says what would be right.

    `actual` is the value in the message (empty: the validated value itself), `at` the key of the field at fault, below
    the validated one.
    """
    return PydanticCustomError("rule", "expected {expected}", {"found": actual, "expected": expected, "at": at})


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, nothing is converted silently, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def row_of(names: Iterable[str]) -> Any:
    """Return a validator that refuses a name that is none of ``names``."""
    valid = tuple(names)

    def check(name: str) -> str:
        if name not in valid:
            raise wrong(f"one of {', '.join(valid)}")
        return name

    return AfterValidator(check)
