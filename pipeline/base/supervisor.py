"""Run a command and end it when its owner ends: ``python supervisor.py OWNER_PID GRACE_S COMMAND...``.

``--after JSON`` before the command is a list of argument lists to run after its end, however it ended: a container, for
example, is not a descendant and must be stopped by name. ``--output PATH`` sends the command's standard output to a
file.

Standard input is a pipe whose other end only the owner holds. The kernel closes it however the owner ends, SIGKILL
included. That, or a signal, is the order to stop: SIGTERM to the command's process group, then SIGKILL to every
descendant after GRACE_S seconds, or after half a second if the signal was SIGINT. The supervisor is a subreaper, so it
also finds processes that left the group or lost their parent.

It prints the command's pid on standard output; its standard error goes to the log, with the command's output. It exits
with the command's exit code (128 + N for signal N). Linux and the standard library only, so that it starts in some 20
ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.2
_GIVE_UP_S = 30.0  # a process inside a driver call cannot be killed; do not wait for ever
_AFTER_S = 60.0  # for each command that tidies up
_TRACKER_S = 0.5  # in which Python's own process frees the shared memory of those that were killed
_HURRY_S = 0.5  # instead of GRACE_S after SIGINT; a vLLM that still loads heeds no SIGTERM

_stopping = 0


def main(owner: int, grace: float, command: list[str], after: list[list[str]], output: str | None) -> int:
    """Run ``command`` until it ends, process ``owner`` ends, or a signal stops it; then run the commands ``after``.

    All descendants are ended, with ``grace`` seconds between SIGTERM and SIGKILL unless the command ended by itself.
    Writes the command's process id to standard output; returns its exit code, 128 + N after signal N. ``output`` is the
    file for the command's standard output, None for standard error.
    """
    # By ctypes, because Python has no prctl. It is needed for safety, not speed: without it a server whose parent was
    # killed would run on and hold its GPUs.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _order_to_stop)
    # PDEATHSIG: if the supervisor itself is killed, the server still gets SIGTERM.
    # Kept until the end: a Popen object that is garbage-collected reaps its command, and its status would be lost.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if output is None else os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666),
        stderr=sys.stderr,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
    )
    server = process.pid
    sys.stdout.write(f"{server}\n")
    sys.stdout.flush()
    status: int | None = None
    while status is None and not _stopping and not _orphaned(owner):
        status = _reap().get(server)
    grace = min(grace, _HURRY_S) if _stopping == signal.SIGINT else grace
    ended = _sweep(server, grace if status is None else 0.0)
    for argv in after:
        _tidy(argv)
    code = os.waitstatus_to_exitcode(ended.get(server, 0) if status is None else status)
    process.returncode = code  # it was reaped here, and not by its object
    return code if code >= 0 else 128 - code


def _tidy(argv: list[str]) -> None:
    """Run a cleanup command without its output; report only one that cannot run or takes too long."""
    try:
        subprocess.run(
            argv,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_AFTER_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"supervisor: {argv[0]} did not tidy up: {error}\n")


def descendants() -> list[int]:
    """Return the ids of all processes below this one, from /proc, without zombies (but with their children).

    A process of many threads looks like a zombie once its first thread has ended, and keeps its children until the
    last.
    """
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in brackets may hold blanks and brackets; the state and the parent follow its last bracket.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            state, parent, threads = fields[0], int(fields[1]), int(fields[17])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
        if state in {"Z", "X"} and threads <= 1:
            ended.add(int(entry.name))
    pids, pending = [], [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        pids += below
        pending += below
    return [pid for pid in pids if pid not in ended]


def _order_to_stop(number: int, _frame: object) -> None:
    global _stopping
    _stopping = number


def _orphaned(owner: int) -> bool:
    """Wait up to 0.2 s; return True once the owner closed its end or is gone (a fork of it may still hold the pipe)."""
    ready, _, _ = select.select([0], [], [], _POLL_S)
    return bool(ready) or os.getppid() != owner


def _reap() -> dict[int, int]:
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def _sweep(group: int, grace: float) -> dict[int, int]:
    """End every descendant; return their wait statuses by process id.

    Process group ``group`` gets SIGTERM; what remains after ``grace`` seconds gets SIGKILL.
    """
    ended = _reap()
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and descendants():
        time.sleep(0.05)
        ended |= _reap()
    began = time.monotonic()
    while alive := descendants():
        elapsed = time.monotonic() - began
        if elapsed > _GIVE_UP_S:
            sys.stderr.write(f"supervisor: SIGKILL did not end {alive}: a driver may hold them\n")
            break
        for pid in alive:
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if elapsed > _TRACKER_S or b"multiprocessing.resource_tracker" not in command:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        ended |= _reap()
    return ended | _reap()


if __name__ == "__main__":
    words, options = sys.argv[3:], {}
    while words[0] in {"--after", "--output"}:
        options[words[0]], words = words[1], words[2:]
    tidy = json.loads(options.get("--after", "[]"))
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), words, tidy, options.get("--output")))
