"""A resident scheduler in a process of its own, to be killed: ``staged_scheduler.py FOLDER RECIPE...``.

It runs in FOLDER with real files of recipes, queue, locks and children; what is due and what a child does is staged.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from quantmint.pipeline.commands.schedule import Log
from quantmint.pipeline.upkeep.fleet.events import Event
from quantmint.pipeline.upkeep.notices import outlets
from quantmint.pipeline.upkeep.schedule.resident import stay
from tests.upkeep.fleet.staged import Stage


def main(folder: Path, recipes: list[str]) -> int:
    os.chdir(folder)
    stage = Stage(folder)
    for name in recipes:
        stage.recipe(name, *stage.plan(name))
    log = Log(as_json=True)
    with outlets(stage.store, warn=log.warn, metrics_file=folder / "quantmint.prom") as (notify, _):

        def hear(event: Event) -> None:
            notify(event)
            log.hear(event)

        def planned(fires: object) -> None:
            (folder / "planned.json").write_text(json.dumps({name: str(at) for name, at in dict(fires).items()}))  # type: ignore[call-overload]

        return stay(stage.options(), (), tell=log.tell, hear=hear, planned=planned, look=stage.look)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
