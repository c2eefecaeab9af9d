"""What the threads of a fleet tell the one that decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.fleet.attempt import Attempted
from pipeline.fleet.job import Job
from pipeline.fleet.requests import Request

if TYPE_CHECKING:
    from pipeline.refresh.due import Due


@dataclass(frozen=True, slots=True)
class Add:
    """Somebody asks for recipes."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Nobody will ask for more."""


@dataclass(frozen=True, slots=True)
class Stop:
    """An order to end, by a signal's number."""

    number: int


@dataclass(frozen=True, slots=True)
class Looked:
    """What is due of new requests, in their order; none, with an error, where that cannot be known."""

    requests: tuple[Request, ...]
    found: tuple[Due, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class LookedAgain:
    """What is due of a recipe whose lock is ours; None, with an error, where that cannot be known."""

    job: Job
    due: Due | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A child came to another stage: ``3/12 calibrate``."""

    job: Job
    stage: str


@dataclass(frozen=True, slots=True)
class Done:
    """How a child ended; None, with an error, where it could not be started."""

    job: Job
    attempted: Attempted | None
    error: str = ""


Message = Add | Close | Stop | Looked | LookedAgain | Stage | Done
