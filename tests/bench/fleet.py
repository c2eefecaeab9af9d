"""How long recipes of which none is due take to look at: cold processes, as a person or a timer starts them.

::

    python -m tests.bench.fleet --json fleet.json

The fleet of the tests is made once for real, over a Hub of its own; then `quantmint due` and `quantmint requantize
--due` are timed by turns. The stand-in answers at once, so what is timed is ours; a Hub that is far away adds its
answers, which are asked for side by side.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import click

from tests.bench.model import describe
from tests.hub.standin import HubStandIn
from tests.upkeep.fleet.world import FLEET, build, environment
from tests.warm.executable import warm_python

COMMANDS = {"due": ("due",), "requantize --due": ("requantize", "--due")}


@click.command()
@click.option("--times", default=5, show_default=True, help="How often each is timed.")
@click.option("--json", "destination", type=click.Path(path_type=Path, dir_okay=False))
def main(times: int, destination: Path | None) -> None:
    """Make the fleet, time both commands, print the seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, HubStandIn() as hub:
        home = Path(folder)
        with warm_python(home, environment(hub, home)) as python:
            world = build(home, hub, python)
            first = world.run("requantize", "--due", "--jobs", "2")
        if first.code:
            raise click.ClickException(f"the fleet could not be made:\n{first.said}")
        click.echo(f"{len(FLEET)} recipes made in {first.seconds:.0f} s")
        for turn in range(times + 1):
            for name, arguments in COMMANDS.items():
                done = world.run(*arguments, python=sys.executable)
                if done.code:
                    raise click.ClickException(f"{name} ended with {done.code}:\n{done.said}")
                if turn:  # the first reads what no cache holds yet
                    seconds[name].append(done.seconds)
    for name, values in seconds.items():
        click.echo(f"quantmint {name:<17} {statistics.median(values):.2f} s, {min(values):.2f} to {max(values):.2f}")
    if destination is not None:
        record = {"machine": describe("cpu"), "recipes": len(FLEET), "seconds": seconds}
        destination.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
