"""What takes long in a round, each in a thread of its own that sends one message at its end, whatever happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from pipeline.errors import QuantmintError
from pipeline.fleet.attempt import attempt, new_log
from pipeline.fleet.job import Job
from pipeline.fleet.messages import Done, Looked, LookedAgain, Message, Stage
from pipeline.fleet.quoting import quotable
from pipeline.fleet.requests import Look, Options, Request

_T = TypeVar("_T")
Send = Callable[[Message], None]


class Errands:
    """Starts them; ``send`` may be called from any thread."""

    def __init__(self, look: Look, options: Options, send: Send) -> None:
        self._look = look
        self._options = options
        self._send = send
        self._one_look = threading.Lock()  # what two looks at once would ask the Hub for is mostly the same

    def look_at(self, requests: tuple[Request, ...]) -> None:
        """Find out what is due of new requests; sends `Looked`."""
        self._start(self._look_at, requests)

    def look_again(self, job: Job) -> None:
        """Find out what is due of one; sends `LookedAgain`."""
        self._start(self._look_again, job)

    def run_child(self, job: Job, environment: Mapping[str, str]) -> threading.Thread:
        """Attempt a recipe; sends `Stage` for each that it comes to, and `Done`."""
        return self._start(lambda job: self._run_child(job, environment), job)

    def _start(self, errand: Callable[[_T], None], argument: _T) -> threading.Thread:
        thread = threading.Thread(target=errand, args=(argument,), daemon=True)
        thread.start()
        return thread

    # A fault of ours, whatever it is, ends its recipe and must not make the others wait for ever: hence Exception.

    def _look_at(self, requests: tuple[Request, ...]) -> None:
        try:
            with self._one_look:
                found = self._look([request.recipe for request in requests])
            self._send(Looked(requests, found))
        except Exception as error:
            self._send(Looked(requests, (), _words(error)))

    def _look_again(self, job: Job) -> None:
        try:
            with self._one_look:
                (due,) = self._look([job.request.recipe])
            self._send(LookedAgain(job, due))
        except Exception as error:
            self._send(LookedAgain(job, None, _words(error)))

    def _run_child(self, job: Job, environment: Mapping[str, str]) -> None:
        options = self._options
        try:
            attempted = attempt(
                options.command_line(job.request.recipe, job.left_of(options.redo)),
                new_log(options.store, job.name),
                environment=environment,
                grace_s=options.grace_s,
                limit_s=job.limit_s,
                stop=job.stop,
                on_stage=lambda stage: self._send(Stage(job, stage)),
                queues=options.on is not None,
            )
            self._send(Done(job, attempted))
        except Exception as error:
            self._send(Done(job, None, _words(error)))


def _words(error: Exception) -> str:
    said = error.message if isinstance(error, QuantmintError) else f"{type(error).__name__}: {error}"
    return quotable(said, os.environ)
