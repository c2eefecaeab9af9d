"""A fleet in a process of its own, to be killed: ``staged_fleet.py FOLDER RECIPE...``, with the command's signals."""

from __future__ import annotations

import sys
from pathlib import Path

from quantmint.pipeline.base.processes import stop_signals
from tests.upkeep.fleet.staged import Stage


def main(folder: Path, recipes: list[str]) -> int:
    stage = Stage(folder)
    for name in recipes:
        stage.recipe(name, *stage.plan(name))

    fleet = stage.fleet(jobs=len(recipes))
    with stop_signals(fleet.stop):
        return fleet.run(recipes).exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
