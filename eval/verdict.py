"""The four words that a judgement can end in."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Verdict(Enum):
    """The outcome of a judgement, ordered from best to worst."""

    PASS = "PASS"  # noqa: S105 - a word, not a password
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    INVALID = "INVALID"

    @property
    def exit_code(self) -> int:
        """Return the exit status of a command that ends in this verdict: PASS 0, FAIL 1, INCONCLUSIVE 3, INVALID 4."""
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3, Verdict.INVALID: 4}[self]

    @classmethod
    def combine(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """Return the worst of several verdicts: INVALID before FAIL before INCONCLUSIVE before PASS; PASS for none.

        A measurement that cannot be trusted says nothing, not even FAIL; doubt elsewhere does not heal a proven loss.
        """
        order = list(cls)
        return max(verdicts, key=order.index, default=cls.PASS)
