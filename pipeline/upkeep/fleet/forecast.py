"""What a fleet would do: which recipes, in which order, on which devices, and why; nothing is locked or run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from pipeline.base.machine import Machine
from pipeline.upkeep.due.state import RecipeState, read_state
from pipeline.upkeep.fleet.devices import NONE, devices_of, free_of
from pipeline.upkeep.fleet.events import Ended
from pipeline.upkeep.fleet.jobs import (
    Job,
    Options,
    Request,
    Room,
    Waiting,
    devices_needed,
    next_begin,
    not_run,
    ordered,
    unaffordable,
    unrun,
)


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
    recipes: Sequence[str], options: Options, warn: Callable[[str], None]
) -> tuple[tuple[Foreseen, ...], tuple[Ended, ...]]:
    """What would run, in its order, and how the others would leave without an attempt; nothing is locked or run."""
    now = time.monotonic()
    devices = NONE if options.on is not None else devices_of(Machine(), options.devices)
    room = Room(
        now,
        options.slots(len(devices.numbers)),
        free_of(options.store, devices.numbers, devices.uuids),
        options.max_s,
        options.max_disk,
    )
    left: list[Ended] = []
    jobs: dict[str, Job] = {}
    for recipe, due in zip(recipes, options.look()(recipes), strict=True):
        broken = due.state == "broken"  # then what was given need not be a name
        state = RecipeState(name=due.name) if broken else read_state(options.store, due.name, warn=warn)
        job, request = Job(Request(recipe), due, state, since=now, ready=now), Request(recipe)
        ended = not_run(request, due, state, options, devices)
        reason = unaffordable(job.waiting(devices), room)
        if ended is None and reason is not None:
            ended = unrun(job, "left", 0, reason)
        if ended is None:
            jobs.setdefault(due.name, job)
        else:
            left.append(ended)
    queue = [job.waiting(devices) for job in jobs.values()]
    begun: dict[str, tuple[int, ...]] = {}
    while (begin := next_begin([one for one in queue if one.name not in begun], room)) is not None:
        name, begun[begin[0]] = begin
        room = replace(room, slots=room.slots - 1, free=tuple(set(room.free) - set(begun[name])))
    return tuple(_foreseen(jobs[one.name], one, begun.get(one.name)) for one in ordered(queue, now)), tuple(left)


def _foreseen(job: Job, queued: Waiting, devices: tuple[int, ...] | None) -> Foreseen:
    return Foreseen(
        recipe=job.name,
        reason=job.due.reason,
        causes=tuple(dict.fromkeys(change.cause for change in job.due.changes)),
        priority=queued.priority,
        needs=devices_needed(job.due),
        devices=devices,
        expected_s=job.state.last_duration_s,
        reruns=tuple(key for key, state in job.due.stages if state == "rerun"),
    )
