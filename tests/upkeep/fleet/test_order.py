"""Which recipe goes next, for any queue: no device and no recipe twice, by priority, everyone once, in the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quantmint.pipeline.upkeep.due.due import Due
from quantmint.pipeline.upkeep.fleet.jobs import FleetJob, Room, next_begin, ordered, unaffordable
from quantmint.pipeline.upkeep.fleet.records import RecipeState
from tests.upkeep.fleet.staged import loaded

HOUR = 3600.0
LOADED = {priority: loaded("a", priority=priority) for priority in range(-100, 101)}


def waiting(
    name: str, *, priority: int = 0, devices: int = 0, ready: float = 0.0, expected_s: float | None = None
) -> FleetJob:
    due = Due(name, name, "due", "", loaded=LOADED[priority])
    return FleetJob(due, RecipeState(name=name, last_duration_s=expected_s), needs=devices, ready=ready)


def queues(*, devices: int = 4) -> st.SearchStrategy[list[FleetJob]]:
    one = st.builds(
        waiting,
        name=st.text("abcdefgh", min_size=1, max_size=3),
        priority=st.integers(-100, 100),
        devices=st.integers(0, devices),
        ready=st.floats(0, 2 * HOUR),
        expected_s=st.floats(0, 4 * HOUR),
    )
    return st.lists(one, max_size=8, unique_by=lambda job: job.name)


ROOMS = st.builds(
    Room,
    now=st.floats(0, 10 * HOUR),
    slots=st.integers(0, 4),
    free=st.lists(st.integers(0, 7), unique=True, max_size=4).map(tuple),
    left_s=st.none() | st.floats(-HOUR, 6 * HOUR),
    left_bytes=st.none() | st.integers(-5, 5),
)


@given(queues(), ROOMS)
def test_what_begins_may_begin(queue: list[FleetJob], room: Room) -> None:
    begin = next_begin(queue, room)
    if begin is None:
        return
    one, devices = begin
    assert room.slots >= 1
    assert one.ready <= room.now
    assert len(devices) == one.needs == len(set(devices))
    assert set(devices) <= set(room.free)
    assert list(devices) == sorted(devices)
    assert room.left_s is None or (one.state.last_duration_s or 0.0) <= room.left_s
    assert room.left_s is None or room.left_s > 0
    assert room.left_bytes is None or room.left_bytes > 0


@given(queues(), ROOMS)
def test_nobody_is_passed_over_but_for_a_reason(queue: list[FleetJob], room: Room) -> None:
    begin = next_begin(queue, room)
    blocked = False
    for one in ordered(queue):
        if begin is not None and one is begin[0]:
            return
        may = one.ready <= room.now and unaffordable(one, room) is None
        if may:  # it was passed: it needs more devices than are free, or than one before it left
            assert room.slots == 0 or one.needs > len(room.free) or (blocked and one.needs > 0)
            blocked = True
    assert begin is None


@given(queues(), st.integers(1, 3), st.integers(0, 4), st.randoms(use_true_random=False))
def test_everyone_is_begun_once_and_no_device_is_shared(
    queue: list[FleetJob], slots: int, devices: int, dice: object
) -> None:
    """A machine as it goes on: recipes begin whenever they may, and end in any order."""
    left = {one.name: one for one in queue if one.needs <= devices}
    names = set(left)
    running: dict[str, tuple[int, ...]] = {}
    begun: list[str] = []
    now = 0.0
    while left or running:
        taken = [number for begun_on in running.values() for number in begun_on]
        assert len(taken) == len(set(taken)) <= devices
        free = tuple(number for number in range(devices) if number not in taken)
        begin = next_begin(left.values(), Room(now, slots - len(running), free))
        if begin is not None:
            job, running[begin[0].name] = begin
            del left[job.name]
            begun.append(job.name)
            continue
        if running:
            running.pop(dice.choice(sorted(running)))  # type: ignore[attr-defined]
            now += 60.0
        else:
            later = [one.ready for one in left.values() if one.ready > now]
            assert later, "nothing runs, nothing is to be waited for, and nothing begins"
            now = min(later)
    assert sorted(begun) == sorted(names)


def test_one_that_needs_many_devices_keeps_those_that_are_free() -> None:
    large, small, none = waiting("a", devices=4), waiting("b", devices=1), waiting("c")
    room = Room(0.0, 2, (1, 2, 3))
    assert next_begin([large, small], room) is None
    assert next_begin([large, small, none], room) == (none, ())
    assert next_begin([small], room) == (small, (1,))


def test_what_waits_for_its_next_attempt_holds_up_nobody() -> None:
    later, other = waiting("a", priority=9, devices=2, ready=50.0), waiting("b", devices=2)
    assert next_begin([later, other], Room(0.0, 1, (0, 1))) == (other, (0, 1))


def test_why_something_is_not_begun_any_more() -> None:
    one = waiting("a", expected_s=2 * HOUR)
    assert unaffordable(one, Room(0.0, 1)) is None
    assert unaffordable(one, Room(0.0, 1, left_s=HOUR)) == "it took 2 h 00 min the last time, and 1 h 00 min are left"
    assert unaffordable(one, Room(0.0, 1, left_s=0.0)) == "the round's time is used up"
    assert unaffordable(one, Room(0.0, 1, left_bytes=0)) == "the round's disk is used up"
    assert unaffordable(waiting("a", expected_s=2 * HOUR, ready=2 * HOUR), Room(0.0, 1, left_s=3 * HOUR)) is not None
