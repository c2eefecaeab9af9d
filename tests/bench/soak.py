"""Hundreds of rounds of one recipe, most of them killed somewhere: what is left of them, in a series and a verdict.

::

    python -m tests.bench.soak --rounds 200 --json docs/soak.json

In each round something moves, the model or the seed of the evaluation, and the recipe is made anew through every stage
on the reference runtime. A seeded die says who is killed with SIGKILL, and when: `quantmint requantize`, one of the
programs that work for it (the run, a server, lm-eval, a supervisor), or nobody. After a round `quantmint gc` collects,
told that it is two hours later, since its hour of grace outlasts a round.

Ends with 1 where a bound breaks: a process or a held lock that is left, a store or a folder of temporary files that
grows.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

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

    ``store`` is bytes.
    """

    moved: str
    fate: Fate
    killed_after: float | None
    seconds: float
    state: str
    processes: int
    locks: int
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
            for number in range(rounds):
                series.append(_round(world, die, number, last=number == rounds - 1, known=series))
                tell(f"{number + 1}/{rounds} {series[-1]}")
    return series


def _round(world: World, die: random.Random, number: int, *, last: bool, known: list[Round]) -> Round:
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
    state = _run(world, die, fate, after)
    seconds = time.monotonic() - began
    left = _left_after(world)
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
        store=sum(sizes),
        files=len(sizes),
        temporary=len(list(Path(world.environment["TMPDIR"]).iterdir())),
    )


def _write(world: World, planned: Planned, seed: int) -> None:
    world.write(RECIPE, replace(planned, seed=seed, keep=2))


def _run(world: World, die: random.Random, fate: Fate, after: float | None) -> str:
    """Run a round; after some seconds kill the fleet, or one of its programs. Return how it ended, in words."""
    process = world.start("requantize", RECIPE, log=world.home / "fleet.log")
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        if fate == "fleet":
            process.kill()
            process.wait()
            return "killed"
        if there := programs(world.python):
            with suppress(ProcessLookupError):
                os.kill(die.choice(there), signal.SIGKILL)
        process.wait()
    return f"ended with {process.returncode}"


def _left_after(world: World) -> list[int]:
    """Processes that are still there some time after a round."""
    end = time.monotonic() + _QUIET_S
    while (left := programs(world.python)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def broken(series: list[Round]) -> list[str]:
    """A sentence for each bound that does not hold."""
    found = []
    for name in ("processes", "locks"):
        worst = max(getattr(one, name) for one in series)
        if worst:
            found.append(f"{name}: {worst} were left after a round")
    first = series[: max(1, len(series) // 5)]
    for name, room in (("temporary", 8), ("files", 200), ("store", 64 << 20)):
        before, after = (max(getattr(one, name) for one in part) for part in (first, series[-len(first) :]))
        if after > before + room:
            found.append(f"{name}: {after:,} in the last fifth, {before:,} in the first")
    if series[-1].state != "ended with 0":
        found.append(f"the last round, which nobody disturbed, ended as: {series[-1].state}")
    return found


if __name__ == "__main__":
    main()
