"""A resident scheduler in a process of its own, to be killed: ``staged_scheduler.py FOLDER [--once] RECIPE...``.

It runs in FOLDER with real files of recipes, queue, locks and children; what is due and what a child does is staged.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.notices.outlets import outlets
from pipeline.schedule.journal import Journal
from pipeline.schedule.service import Service
from tests.fleet.staged import Stage


def main(folder: Path, recipes: list[str], *, once: bool) -> int:
    os.chdir(folder)
    stage = Stage(folder)
    for name in recipes:
        stage.recipe(name, *stage.plan(name))

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    journal = Journal(write, as_json=True)
    with outlets(stage.store, warn=journal.warn, metrics_port=0) as told:
        journal.tell("metrics", "", port=told.metrics_port)
        return Service(stage.options(), (), journal, told, look=stage.look).run(once=once)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [name for name in sys.argv[2:] if name != "--once"], once="--once" in sys.argv))
