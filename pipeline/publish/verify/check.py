"""The answer to one question about a release: it holds, it does not, or nobody could tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Outcome(Enum):
    """How a check ended. What could not be looked at is never OK."""

    OK = "OK"
    FAILS = "FAILS"
    NOT_CHECKED = "NOT CHECKED"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: ``reason`` is a sentence, ``details`` are further ones; both may quote what a stranger wrote."""

    name: str
    outcome: Outcome
    reason: str
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "details": list(self.details),
        }


def judged(name: str, faults: Sequence[str], holds: str, *, details: Sequence[str] = ()) -> Check:
    """FAILS with every fault, the first as its reason; OK where there is none, with ``holds`` and ``details``."""
    if faults:
        return Check(name, Outcome.FAILS, faults[0], tuple(faults[1:]))
    return Check(name, Outcome.OK, holds, tuple(details))


def fails(name: str, reason: str, *details: str) -> Check:
    """A check that found a contradiction."""
    return Check(name, Outcome.FAILS, reason, details)


def not_checked(name: str, reason: str, *details: str) -> Check:
    """A check that could not be made, and why."""
    return Check(name, Outcome.NOT_CHECKED, reason, details)


def exit_code(checks: Sequence[Check]) -> int:
    """1 where something fails, 3 where nothing does but something could not be checked, else 0."""
    outcomes = {check.outcome for check in checks}
    return 1 if Outcome.FAILS in outcomes else 3 if Outcome.NOT_CHECKED in outcomes else 0
