"""Times one command from its start to its exit: `python -I child.py OUT ERR COMMAND...` prints what it took as JSON.

A process of its own, and a small one: Linux counts what is resident at the fork as the child's peak as well. What is
timed finds the second at which it was started, of the clock that all processes share, as ``BENCH_BEGUN``.
"""

from __future__ import annotations

import json
import os
import sys
import time


def run(out: str, err: str, command: list[str]) -> dict[str, float]:
    """Seconds (``begun``, ``ended``, ``cpu``: user and system, children included), peak bytes (``rss``), and ``code``.

    The command's standard output and error go to the files ``out`` and ``err``.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    redirect = [(os.POSIX_SPAWN_OPEN, number, path, flags, 0o644) for number, path in ((1, out), (2, err))]
    begun = time.monotonic()
    environment = {**os.environ, "BENCH_BEGUN": repr(begun)}
    pid = os.posix_spawnp(command[0], command, environment, file_actions=redirect)
    _, status, used = os.wait4(pid, 0)
    return {
        "begun": begun,
        "ended": time.monotonic(),
        "cpu": used.ru_utime + used.ru_stime,
        "rss": used.ru_maxrss * 1024,
        "code": os.waitstatus_to_exitcode(status),
    }


if __name__ == "__main__":
    json.dump(run(sys.argv[1], sys.argv[2], sys.argv[3:]), sys.stdout)
