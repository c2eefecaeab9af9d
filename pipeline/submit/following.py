"""A job's log as it grows, then how it ended, through whatever lies between us and its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol, TypeVar

from pipeline.errors import StageError, UserError

PATIENCE_S: Final = 600.0
"""How long a place may be away before a job that goes on is given up to whoever asks next."""
_PAUSE_S: Final = 2.0


class _Look(Protocol):
    @property
    def ended(self) -> bool: ...


L = TypeVar("L", bound=_Look)


def followed(
    identifier: str,
    lines: Callable[[str], Iterator[str]],
    now: Callable[[str], L],
    show: Callable[[str], None],
    *,
    pause_s: float | None = None,
    patience_s: float = PATIENCE_S,
) -> L:
    """Show the log until the job has ended, and return the look ``now`` that found it so.

    ``lines`` begins at the log's beginning each time, and may end before the job does: nothing is shown twice. Raises
    the `StageError` of a place that is away for longer than ``patience_s`` seconds, and a transient one for a job that
    the place has forgotten.
    """
    shown, heard = 0, time.monotonic()
    while True:
        try:
            for piece in beyond(shown, lines(identifier)):
                shown += len(piece)
                if piece:
                    show(piece)
                heard = time.monotonic()
            look = now(identifier)
            if look.ended:
                return look
            heard = time.monotonic()
        except UserError as error:
            said = f"{identifier}: the cluster does not know it any more: {error.message}"
            raise StageError(said, hint=error.hint, transient=True) from error
        except StageError as error:
            if not error.transient or time.monotonic() - heard > patience_s:
                raise
        time.sleep(_PAUSE_S if pause_s is None else pause_s)


def beyond(shown: int, pieces: Iterable[str]) -> Iterator[str]:
    """``pieces`` without the first ``shown`` characters of all; "" for one that lies within them."""
    for piece in pieces:
        yield piece[shown:]
        shown = max(0, shown - len(piece))
