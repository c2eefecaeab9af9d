"""Imports modules, then forks a program for each caller: ``python forks.py SOCKET EXECUTABLE MODULE...``.

Run by path, by the Python whose libraries they are: standard library only. It says ``warm`` when it takes callers, and
stops when its input ends. A program is a module or a script that is run, from its first line to what it does at exit,
or what `multiprocessing` spawns.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_SPAWNED = "--multiprocessing-fork"
"""The last argument of what `multiprocessing` spawns."""


def _serve(place: str, executable: str, *modules: str) -> None:
    """Fork for each caller until our input ends."""
    sys.executable = executable  # some modules read it while they are imported
    sys.path[0] = str(Path.cwd())
    before = dict(os.environ)
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):  # it was moved: whoever needs it imports it
            importlib.import_module(name)
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.fsync = lambda fd: None  # no test takes the machine's power away
    _require_no_thread()
    gc.freeze()  # a fork that collects would write to, and so copy, all of it
    waiters: set[int] = set()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(64)
        os.write(1, b"warm\n")
        while True:
            ready, _, _ = select.select([listening, 0], [], [], 0.5)
            if 0 in ready:
                break
            if listening in ready:
                line, _ = listening.accept()
                pid = os.fork()
                if pid == 0:
                    listening.close()
                    _wait_on(line, before, changed, Path(place).parent)
                waiters.add(pid)
                line.close()
            waiters = {pid for pid in waiters if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    for pid in waiters:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in waiters:
        os.waitpid(pid, 0)
    os._exit(0)  # libraries would say what they leak when all is torn down


def _require_no_thread() -> None:
    """A fork has one thread, and waits for ever for others that libraries believe in: OpenMP's, of any first loop.

    OpenBLAS starts its own when it is loaded, and ends them before each fork; jemalloc starts its own anew after it.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    running = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    missing = [name for name in running if name != "jemalloc_bg_thd"][1:]
    assert not missing, f"these threads would be missing in forks: {missing}"


def _wait_on(line: socket.socket, before: Mapping[str, str], changed: Mapping[str, str], running: Path) -> None:
    """Fork the program, pass signals on, and tell how it ended; never returns.

    What it spawned may be killed and outlive, for a moment, what the program takes for it. The program has not ended
    before that has: each that is spawned is a file in ``running`` for as long as there is a process of it.
    """
    head, files, _, _ = socket.recv_fds(line, 4, 253)
    content = b""
    while len(content) < int.from_bytes(head, "big"):
        content += line.recv(1 << 20)
    asked = json.loads(content)
    mark = running / f"{asked['parent']}-{os.getpid()}.running"
    if asked["arguments"][-1] == _SPAWNED:
        mark.touch()
    pid = os.fork()
    if pid == 0:
        line.close()
        variables = asked["environment"]
        imported = {name: value for name, value in changed.items() if variables.get(name) == before.get(name)}
        _hold(files, asked["numbers"])
        _become(asked["arguments"], {**variables, **imported}, asked["folder"])
    for file in (0, 1, *files):
        os.close(file)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([line, ended], [], [])
        if ended in ready:
            break
        told = line.recv(1)
        os.kill(pid, told[0] if told else signal.SIGKILL)
        if not told:
            break
    _, status = os.waitpid(pid, 0)
    mark.unlink(missing_ok=True)
    while any(running.glob(f"{pid}-*.running")):
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        line.sendall(status.to_bytes(4, "big"))
    os._exit(0)


def _hold(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the files the numbers that they have where the program was started, none of which may be in use but 0..2."""
    away = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(away, numbers, strict=True):
        assert number <= 2 or not Path(f"/proc/self/fd/{number}").exists(), f"file {number} is in use"
        os.dup2(file, number)
        os.close(file)


def _become(argv: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Be the program, from its first line to what it does at exit; never returns."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)

    sys.path[0] = folder
    code: object = 1
    try:
        if argv[-1] == _SPAWNED:
            _be_spawned(argv)
        elif argv[0].endswith(".py"):
            sys.argv, sys.path[0] = list(argv), str(Path(argv[0]).parent)
            runpy.run_path(argv[0], run_name="__main__")
        else:
            sys.argv = list(argv)
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # told as the interpreter tells it
        traceback.print_exc()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def _be_spawned(argv: Sequence[str]) -> None:
    """What multiprocessing has a new interpreter do; it then reads which module its parent's main one was."""
    code = argv[argv.index("-c") + 1]
    sys.argv = ["-c", *argv[argv.index("-c") + 2 :]]
    exec(code, {"__name__": "__main__"})  # noqa: S102


if __name__ == "__main__":
    _serve(*sys.argv[1:])
