"""The base class of a recipe's sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

PRINTABLE = r"^[^\x00-\x1f]+$"
"""Pattern of paths and addresses: none can hold the rest."""


def wrong(expected: str, *, found: str = "", at: str = "") -> PydanticCustomError:
    """A fault of a rule: `found` stands for the value itself where it is empty, `at` for a field below it."""
    return PydanticCustomError("rule", "expected {expected}", {"found": found, "expected": expected, "at": at})


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, nothing is converted silently, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
