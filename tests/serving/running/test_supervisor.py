"""Who is below the supervisor: asked of real processes in the states that end a server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantmint.pipeline.base.supervisor import descendants

# Its first thread has ended, another goes on; and it has a child.
HEADLESS = """
import ctypes, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
threading.Thread(target=time.sleep, args=(600,)).start()
print(child.pid, flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def headless() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", HEADLESS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child
    for pid in (process.pid, child):
        subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)
    process.stdout.close()
    process.wait()


def test_the_children_of_a_process_whose_first_thread_has_ended_are_found(
    headless: tuple[subprocess.Popen[str], int],
) -> None:
    """vLLM ends like that: for a moment it looks dead and still has a child, which then writes into its log."""
    process, child = headless
    stat = Path(f"/proc/{process.pid}/stat")
    deadline = time.monotonic() + 10
    while (state := stat.read_text().rpartition(")")[2].split()[0]) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state == "Z"
    assert {process.pid, child} <= set(descendants())


def test_a_process_that_only_waits_to_be_reaped_is_not_counted() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    deadline = time.monotonic() + 10
    while process.pid in descendants() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid not in descendants()
    process.wait()
