"""Hundreds of rounds of one recipe, most of them killed somewhere: what is left of them, in a series and a verdict.

::

    python -m tests.bench.soak --rounds 200 --json docs/soak.json

In each round something moves, the model or the seed of the evaluation, and the recipe is made anew through every stage
on the reference runtime. A seeded die says who is killed with SIGKILL, and when: the fleet, one of the programs that
work for it (the run, a server, lm-eval, a supervisor), or nobody. Half of the rounds are run by a fleet that stays, as
in `quantmint schedule run`, whose memory and descriptors are watched; a fleet that is killed is a process of its own.
After a round `quantmint gc` collects, told that it is two hours later, since its hour of grace outlasts a round.

Ends with 1 where a bound breaks: a process or a held lock that is left, a descriptor or memory that grows, a store or a
folder of temporary files that does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from quantmint.pipeline.store.gc import apply, plan_gc
from quantmint.pipeline.store.locks import STALE_AFTER_S, is_held
from quantmint.pipeline.store.tree import Store
from tests.bench.model import describe
from tests.hub.standin import HubStandIn
from tests.upkeep.fleet.world import FLEET, Planned, World, build, environment
from tests.warm.executable import programs, warm_python

Fate = Literal["whole", "program", "fleet"]
RECIPE = "north-block"
LATER_S = 7200.0
_QUIET_S = 60.0  # what a killed round gets to end what it started


@dataclass(frozen=True)
class Round:
    """What moved, who was killed and after how many seconds, how it ended, and what is there afterwards.

    ``rss`` and ``store`` are bytes, ``rss`` and ``descriptors`` those of the fleet that stays.
    """

    moved: str
    fate: Fate
    killed_after: float | None
    seconds: float
    state: str
    processes: int
    locks: int
    descriptors: int
    rss: int
    store: int
    files: int
    temporary: int

    @property
    def whole(self) -> bool:
        """Whether it came to its end before anybody was killed."""
        return self.fate == "whole" or self.state == "ended with 0"


@click.command()
@click.option("--rounds", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "destination", type=click.Path(path_type=Path, dir_okay=False))
def main(rounds: int, seed: int, destination: Path | None) -> None:
    """Run, write what was seen, and end with 1 where a bound broke."""
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        series = soak(Path(home), rounds, seed, tell=lambda line: click.echo(line, err=True))
    faults = broken(series)
    record = {"machine": describe("cpu"), "seed": seed, "faults": faults, "rounds": [asdict(one) for one in series]}
    if destination is not None:
        destination.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


def soak(home: Path, rounds: int, seed: int, tell: Callable[[str], None]) -> list[Round]:
    """Run so many rounds in an empty folder; the last is a whole one and has to pass."""
    die, series = random.Random(seed), list[Round]()  # noqa: S311 - a die that falls the same way again
    temporary = home / "tmp"
    temporary.mkdir()
    with HubStandIn() as hub:
        variables = {**environment(hub, home), "TMPDIR": str(temporary)}
        with warm_python(home, variables) as python:
            world = build(home, hub, python, {RECIPE: FLEET[RECIPE]})
            world.environment = variables
            with _resident(world) as resident:
                for number in range(rounds):
                    series.append(_round(world, resident, die, number, last=number == rounds - 1, known=series))
                    tell(f"{number + 1}/{rounds} {series[-1]}")
    return series


def _round(
    world: World, resident: subprocess.Popen[str], die: random.Random, number: int, *, last: bool, known: list[Round]
) -> Round:
    moved = "model" if number == 0 or die.random() < 0.2 else "seed"
    fate: Fate = "whole" if last or number == 0 else die.choices(("whole", "program", "fleet"), (2, 4, 4))[0]
    if moved == "model" and number:
        world.move_base("north")
    _write(world, FLEET[RECIPE], seed=number)
    # At any moment of the time that it takes when nobody disturbs it.
    whole = [one for one in known if one.whole]
    alike = [one.seconds for one in whole if one.moved == moved] or [one.seconds for one in whole]
    after = None if fate == "whole" else die.uniform(0, statistics.median(alike[-5:]))
    began = time.monotonic()
    state = _asked(resident, world, after, die) if after is None or fate == "program" else _killed_fleet(world, after)
    seconds = time.monotonic() - began
    left = _left_after(world, resident)
    plan = plan_gc(Store(world.store), keep=2, now=time.time() + LATER_S)
    apply(plan, now=time.time() + LATER_S)
    sizes = [path.lstat().st_size for path in world.store.rglob("*") if path.is_file()]
    return Round(
        moved=moved,
        fate=fate,
        killed_after=None if after is None else round(after, 2),
        seconds=round(seconds, 2),
        state=state,
        processes=len(left),
        locks=sum(is_held(path, stale_after=STALE_AFTER_S, now=time.time()) for path in world.store.rglob("*.lock")),
        descriptors=len(list(Path(f"/proc/{resident.pid}/fd").iterdir())),
        rss=int(Path(f"/proc/{resident.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        store=sum(sizes),
        files=len(sizes),
        temporary=len(list(Path(world.environment["TMPDIR"]).iterdir())),
    )


def _write(world: World, planned: Planned, seed: int) -> None:
    world.write(RECIPE, replace(planned, seed=seed, keep=2))


@contextmanager
def _resident(world: World) -> Iterator[subprocess.Popen[str]]:
    with (world.home / "resident.log").open("w") as log, subprocess.Popen(
        [sys.executable, "-m", "tests.bench.resident", str(world.store), str(world.python)],
        cwd=world.home, env=world.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            with suppress(BrokenPipeError):
                process.communicate(timeout=_QUIET_S)


def _asked(resident: subprocess.Popen[str], world: World, after: float | None, die: random.Random) -> str:
    """A round of the fleet that stays, one of whose programs is killed after some seconds."""
    assert resident.stdin is not None
    assert resident.stdout is not None
    resident.stdin.write(f"{RECIPE}\n")
    resident.stdin.flush()
    if after is not None:
        time.sleep(after)
        there = programs(world.python)
        if there:
            with suppress(ProcessLookupError):
                os.kill(die.choice(there), signal.SIGKILL)
    ended: dict[str, Any] = json.loads(resident.stdout.readline())
    return f"{ended['state']} {ended['verdict'] or ''}".strip()


def _killed_fleet(world: World, after: float) -> str:
    """A round of a fleet of its own, which is killed after some seconds if it still runs then."""
    process = world.start("requantize", RECIPE, log=world.home / "fleet.log")
    try:
        process.wait(timeout=after)
        return f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "killed"


def _left_after(world: World, resident: subprocess.Popen[str]) -> list[int]:
    """Processes that are still there some time after a round."""
    end = time.monotonic() + _QUIET_S
    while (left := programs(world.python)) and time.monotonic() < end:
        time.sleep(0.1)
    if resident.poll() is not None:
        raise RuntimeError(f"the fleet that stays ended: {(world.home / 'resident.log').read_text()}")
    return left


def broken(series: list[Round]) -> list[str]:
    """A sentence for each bound that does not hold."""
    found = []
    for name in ("processes", "locks"):
        worst = max(getattr(one, name) for one in series)
        if worst:
            found.append(f"{name}: {worst} were left after a round")
    first = series[: max(1, len(series) // 5)]
    for name, room in (("descriptors", 4), ("rss", 32 << 20), ("temporary", 8), ("files", 200), ("store", 64 << 20)):
        before, after = (max(getattr(one, name) for one in part) for part in (first, series[-len(first) :]))
        if after > before + room:
            found.append(f"{name}: {after:,} in the last fifth, {before:,} in the first")
    if series[-1].state != "ran PASS":
        found.append(f"the last round, which nobody disturbed, ended as: {series[-1].state}")
    return found


if __name__ == "__main__":
    main()
