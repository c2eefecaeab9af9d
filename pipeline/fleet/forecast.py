"""What a round would do: which recipes, in which order, on which devices, and why; nothing is locked or run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pipeline.fleet.devices import Devices
from pipeline.fleet.job import Job, causes_of, devices_needed, impossible, not_run, unrun
from pipeline.fleet.order import Room, next_begin, ordered, unaffordable
from pipeline.fleet.requests import Options, Request
from pipeline.fleet.summary import Ended
from pipeline.refresh.due import Due
from pipeline.refresh.state import RecipeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """A recipe that would run. ``devices`` are numbers of those that it would have at once, None where it has to wait.

    ``needs`` is how many, also of a cluster, where none here are taken; ``expected_s`` how long it took the last time,
    None where nobody knows; ``reruns`` are the stages that would be made.
    """

    recipe: str
    reason: str
    causes: tuple[str, ...]
    priority: int
    needs: int
    devices: tuple[int, ...] | None
    expected_s: float | None
    reruns: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def foresee(
    found: Sequence[tuple[Request, Due, RecipeState]], options: Options, devices: Devices, free: tuple[int, ...]
) -> tuple[tuple[Foreseen, ...], tuple[Ended, ...]]:
    """What would run, in its order, and how the others leave the round without an attempt."""
    now = time.monotonic()
    left: list[Ended] = []
    jobs: dict[str, Job] = {}
    for request, due, state in found:
        ended = not_run(request, due, state, everything=options.runs_everything) or impossible(request, due, devices)
        if ended is None:
            jobs.setdefault(due.name, Job(request, due, state, since=now, ready=now))
        else:
            left.append(ended)
    waiting = {name: job.waiting(any_devices=devices.variable is not None) for name, job in jobs.items()}
    slots = options.slots(len(devices.numbers))
    seconds = None if options.max_hours is None else options.max_hours * 3600
    begun: dict[str, tuple[int, ...]] = {}
    while True:
        rest = [one for name, one in waiting.items() if name not in begun]
        room = Room(now=now, slots=slots - len(begun), free=free, left_s=seconds, left_bytes=options.max_disk)
        begin = next_begin(rest, room)
        if begin is None:
            break
        begun[begin.name] = begin.devices
        free = tuple(number for number in free if number not in begin.devices)
    runs = []
    for one in ordered(waiting.values(), now):
        job = jobs[one.name]
        never = unaffordable(one, Room(now=now, slots=0, left_s=seconds, left_bytes=options.max_disk))
        if never is not None:
            left.append(unrun(job, "left", 0, never))
            continue
        runs.append(
            Foreseen(
                recipe=one.name,
                reason=job.due.reason,
                causes=causes_of(job.due),
                priority=one.priority,
                needs=one.devices if options.on is None else devices_needed(job.due),
                devices=begun.get(one.name),
                expected_s=job.state.last_duration_s,
                reruns=tuple(key for key, state in job.due.stages if state == "rerun"),
            )
        )
    return tuple(runs), tuple(left)
