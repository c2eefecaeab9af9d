"""A fleet that stays, as a scheduler has one: each line of its input asks for a recipe, whose end is told as JSON.

python -m tests.bench.resident STORE PYTHON < pipe
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from quantmint.pipeline.upkeep.fleet.events import Event
from quantmint.pipeline.upkeep.fleet.jobs import Options, Request
from quantmint.pipeline.upkeep.fleet.rounds import Fleet


def main(store: str, python: str) -> None:
    """Run until the input ends."""
    options = Options(store=Path(store), command=(python, "-m", "quantmint", "run"), first_wait_s=0.1)
    fleet = Fleet(options, on_event=_tell, warn=_unheard)

    def listen() -> None:
        for line in sys.stdin:
            fleet.add([Request(line.strip())])
        fleet.close()

    threading.Thread(target=listen, daemon=True).start()
    fleet.run()


def _unheard(_: str) -> None:
    return


def _tell(event: Event) -> None:
    if event.kind in ("finished", "held"):
        print(json.dumps({"state": event.state, "verdict": event.verdict}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
