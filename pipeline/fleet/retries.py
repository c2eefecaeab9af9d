"""When an attempt is repeated, and after how long."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.fleet.attempt import Attempted
from pipeline.refresh.state import RecipeState, moment

_LONGEST_WAIT_S: Final = 3600.0
_FIRST_REST_S: Final = 900.0
_LONGEST_REST_S: Final = 86400.0


def again_in_s(ended: Attempted, *, failed: int, killed: int, retries: int, first: float) -> float | None:
    """Seconds until a recipe is tried again in this round; None where it is not.

    ``failed`` and ``killed`` count the attempts that ended by a fault that passes, and by a signal that was not ours,
    this one included: a fault that passes is given ``retries`` more, a signal one more.
    """
    if ended.cut_short or ended.judged:
        return None
    if ended.transient and failed <= retries:
        return wait_s(failed, first)
    if ended.killed and killed <= min(1, retries):
        return wait_s(killed, first)
    return None


def wait_s(failed: int, first: float) -> float:
    """Seconds before the next attempt of a round, ``failed`` of which failed: they double, up to an hour.

    A tenth by chance on top: recipes that one outage stopped do not all come back in one moment.
    """
    return _doubled(failed, first, _LONGEST_WAIT_S, chance=True)


def rest_s(rounds: int) -> float:
    """Seconds before a recipe that failed in ``rounds`` rounds is tried again: 15 min, then double, up to a day."""
    return _doubled(rounds, _FIRST_REST_S, _LONGEST_REST_S, chance=False)


def resting_until(state: RecipeState, inputs: str, now: datetime) -> datetime | None:
    """Until when a recipe that failed is left alone; None where it may be tried.

    It is tried at once when its inputs are others than those that it failed with. A clock that was set back does not
    prolong a rest: a failure in the future, or a rest longer than any, counts for nothing.
    """
    until, failed = moment(state.not_before), moment(state.last_attempt)
    if until is None or until <= now or (inputs and state.inputs != inputs):
        return None
    turned_back = failed is not None and failed > now + timedelta(minutes=1)
    return None if turned_back or until - now > timedelta(seconds=_LONGEST_REST_S) else until


def rests_until(rounds: int, now: datetime | None = None) -> str:
    """The time, ISO 8601 in UTC, before which a recipe that failed in ``rounds`` rounds is not tried."""
    return ((now or datetime.now(UTC)) + timedelta(seconds=rest_s(rounds))).strftime("%Y-%m-%dT%H:%M:%SZ")


def _doubled(number: int, first: float, longest: float, *, chance: bool) -> float:
    from tenacity import RetryCallState, Retrying, wait_exponential, wait_random

    arithmetic = wait_exponential(multiplier=first, min=0, max=longest)
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = max(1, number)
    spread = wait_random(0, first / 10) if chance else wait_random(0, 0)
    return float((arithmetic + spread)(state))
