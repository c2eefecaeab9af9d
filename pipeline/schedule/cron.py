"""Cron expressions of five fields, with the meaning that Debian's cron gives them, also where clocks change.

>>> fault_of("0 3 * * 6") is None
True
"""

from __future__ import annotations


def fault_of(expression: str) -> str | None:
    """What is wrong with an expression, in a few words; None where nothing is."""
    from cronsim import CronSimError

    if len(expression.split()) != 5:
        return f"{len(expression.split())} fields"
    try:
        _parsed(expression)
    except CronSimError as error:
        return str(error)
    return None


def _parsed(expression: str) -> object:
    from datetime import UTC, datetime

    from cronsim import CronSim

    return CronSim(expression, datetime(2026, 1, 1, tzinfo=UTC))
