"""A call that ends after a while, whatever the library does that it goes into.

For clients whose requests have no timeout of their own: a connection that was dropped between us and a server says
nothing, ever. The call goes on in a thread that keeps no process alive.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

R = TypeVar("R")


def within(seconds: float, call: Callable[[], R]) -> R:
    """What ``call`` returns or raises; TimeoutError where it does neither in that time, and may do so later.

    Signals are heard meanwhile.
    """
    answers: SimpleQueue[tuple[R, None] | tuple[None, BaseException]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # whoever waits raises it
            answers.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
