"""A recipe's hours begin when a cluster has room for it: what waits there has not used them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from pipeline.fleet.attempt import Attempted, attempt

_ENDS = "import sys, time\nprint('job has found room', file=sys.stderr, flush=True)\ntime.sleep(60)"


def tried(tmp_path: Path, code: str, limit_s: float | None, stop: threading.Event | None = None) -> Attempted:
    command = [sys.executable, "-S", "-c", code]
    return attempt(
        command, tmp_path / "one.log", environment={}, grace_s=5, limit_s=limit_s, stop=stop or threading.Event(),
        on_stage=lambda _: None, queues=True,
    )  # fmt: skip


def test_what_waits_is_not_ended(tmp_path: Path) -> None:
    """It may run for no time at all, and ends by itself."""
    ended = tried(tmp_path, 'import time\ntime.sleep(0.3)\nprint(\'{"verdict": "PASS"}\')', limit_s=0.0)
    assert (ended.cut_short, ended.verdict) == (False, "PASS")


def test_what_runs_is_ended(tmp_path: Path) -> None:
    ended = tried(tmp_path, _ENDS, limit_s=0.0)
    assert ended.cut_short
    assert "refresh.max_hours" in ended.error


def test_what_was_stopped_while_it_waited_ran_for_no_time(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    ended = tried(tmp_path, "import time\ntime.sleep(60)", limit_s=None, stop=stop)
    assert (ended.cut_short, ended.seconds) == (True, 0.0)
