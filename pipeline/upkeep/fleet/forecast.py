"""What a round would do: which recipes, in which order, on which devices, and why; nothing is locked or run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from pipeline.base.machine import Machine
from pipeline.upkeep.due.state import RecipeState, read_state
from pipeline.upkeep.fleet.devices import NONE, devices_of, free_of
from pipeline.upkeep.fleet.events import Ended
from pipeline.upkeep.fleet.jobs import Job, Options, Request, causes_of, devices_needed, not_run, unrun
from pipeline.upkeep.fleet.order import Room, next_begin, ordered, unaffordable


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
    """What would run, in its order, and how the others leave the round without an attempt."""
    now = time.monotonic()
    devices = NONE if options.on is not None else devices_of(Machine(), options.devices)
    free = free_of(options.store, devices.numbers, devices.uuids)
    left: list[Ended] = []
    jobs: dict[str, Job] = {}
    for recipe, due in zip(recipes, options.look()(recipes), strict=True):
        state = RecipeState(name=due.name)
        if due.state != "broken":  # then what was given need not be a name
            state = read_state(options.store, due.name, warn=warn)
        request = Request(recipe)
        ended = not_run(request, due, state, options, devices)
        if ended is None:
            jobs.setdefault(due.name, Job(request, due, state, since=now, ready=now))
        else:
            left.append(ended)
    room = Room(now, options.slots(len(devices.numbers)), free, options.max_s, options.max_disk)
    waiting = {name: job.waiting(devices) for name, job in jobs.items()}
    begun: dict[str, tuple[int, ...]] = {}
    while (begin := next_begin([one for one in waiting.values() if one.name not in begun], room)) is not None:
        name, taken = begin
        begun[name] = taken
        room = replace(room, slots=room.slots - 1, free=tuple(set(room.free) - set(taken)))
    runs = []
    for one in ordered(waiting.values(), now):
        job = jobs[one.name]
        never = unaffordable(one, room)
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
