"""A Python whose programs start as forks of one process that has imported the libraries, and ours, already.

    with warm_python(folder, environment) as python:
        subprocess.run([python, "-m", "pipeline", "requantize", "--due"])

A dozen recipes make half a hundred programs, each of which imports PyTorch and transformers for longer than it then
computes for a tiny model. What runs is the program all the same: its own process, arguments, environment, folder and
files, and so are the programs that it starts by `sys.executable`. Only the settings that a library reads while it is
imported are those of ``environment``.

The executable is a small script that waits for the fork: signals go through it, and the fork ends with it, by SIGKILL
where it was killed. ``-c``, and what is started with ``-I``, is left to the real interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_IMPORTED = (
    "torch", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "transformers.masking_utils", "transformers.core_model_loading",
    "transformers.conversion_mapping", "tokenizers", "safetensors.torch", "datasets", "lm_eval.tasks",
    "lm_eval.evaluator", "lm_eval.models.openai_completions", "scipy.stats", "matplotlib.pyplot",
    "matplotlib.backends.backend_svg", "huggingface_hub.hf_api", "jinja2", "pydantic", "cyclonedx.model.bom",
    "cyclonedx.output.json", "detect_secrets.core.scan", "tenacity", "rich.progress", "httpx",
    # Ours take a second as well: models of pydantic, tables.
    "pipeline.cli", "pipeline.commands.requantize", "pipeline.commands.run", "pipeline.runner", "pipeline.session",
    "pipeline.planning", "pipeline.preflight", "pipeline.refresh.due", "pipeline.fleet.round", "pipeline.fleet.display",
    "pipeline.notices.outlets", "pipeline.engines.stream.engine", "pipeline.inspection.inspect",
    "pipeline.tracking.after_run", "pipeline.publish.opening", "pipeline.publish.hub.target",
    "pipeline.publish.card.rendering",
    "pipeline.publish.sbom", "pipeline.publish.secrets", "pipeline.reference.model", "pipeline.reference.service",
    "pipeline.reference.greedy", "pipeline.reference.text", "calibration.calibrate", "eval.report.page",
    "eval.report.views", "eval.harness_client",
)  # fmt: skip
_PROCESSES: dict[str, int] = {}
"""The process that forks, by its executable."""
# The script: what it was called with goes to the socket, with its files; what comes back is how the fork ended.
_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
arguments = sys.argv[1:]
if arguments[:1] == ["-P"]:
    arguments = arguments[1:]
if arguments[:1] != ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
line = socket.socket(socket.AF_UNIX)
line.connect({socket!r})
asked = {{"arguments": arguments[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
content = json.dumps(asked).encode()
socket.send_fds(line, [len(content).to_bytes(4, "big")], [0, 1, 2])
line.sendall(content)
os.close(0)  # who waits for the end of a pipe waits for the fork's end of it alone
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: line.send(bytes([number])))
answer = b""
while len(answer) < 4:
    part = line.recv(4 - len(answer))
    if not part:
        os._exit(70)
    answer += part
status = int.from_bytes(answer, "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


@contextlib.contextmanager
def warm_python(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """The executable, for as long as the block runs; what still runs then is killed."""
    place, script = folder / "warm.socket", folder / "python"
    argv = [sys.executable, "-m", "tests.fleet.warm", str(place), str(script)]
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        argv, cwd=root, env={**environment, "PYTHONPATH": root}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"warm\n"
        script.write_text(_SCRIPT.format(python=sys.executable, socket=str(place)), encoding="utf-8")
        script.chmod(0o755)
        _PROCESSES[str(script)] = process.pid
        yield script
    finally:
        process.communicate()  # the end of its input is the order to stop


def programs(python: str | Path) -> list[int]:
    """Processes of the programs that such a Python runs now, and of what they started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [pid for waiter in children.get(_PROCESSES[str(python)], []) for pid in children.get(waiter, [])]
    for pid in found:
        found += children.get(pid, [])  # the list grows while it is read
    return found


def _serve(place: str, script: str) -> None:
    """Fork for each caller until our input ends."""
    sys.executable = script  # some of ours read it while they are imported
    for name in _IMPORTED:
        importlib.import_module(name)
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
                    _wait_on(line)
                waiters.add(pid)
                line.close()
            waiters = {pid for pid in waiters if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    for pid in waiters:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in waiters:
        os.waitpid(pid, 0)


def _wait_on(line: socket.socket) -> None:
    """Fork the program, pass signals on, and tell how it ended; never returns."""
    head, files, _, _ = socket.recv_fds(line, 4, 3)
    content = b""
    while len(content) < int.from_bytes(head, "big"):
        content += line.recv(1 << 20)
    asked = json.loads(content)
    pid = os.fork()
    if pid == 0:
        line.close()
        _become(asked, files)
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
    with contextlib.suppress(OSError):
        line.sendall(status.to_bytes(4, "big"))
    os._exit(0)


def _become(asked: Mapping[str, Any], files: list[int]) -> None:
    """Be the program, from its first line to what it does at exit; never returns."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])

    module, *arguments = asked["arguments"]
    sys.argv = [module, *arguments]
    sys.path[0] = asked["folder"]
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
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


if __name__ == "__main__":
    _serve(*sys.argv[1:])
