"""A stand-in for the ``docker`` command, with an engine whose containers are no children of the client.

``fake_docker.py engine FOLDER`` is the engine: it runs the command of each container in a process of its own. Every
other call is the client's: it appends its arguments to ``calls`` in the folder that DOCKER_HOST names and talks to the
engine there. ``run`` shows the container's output, passes SIGTERM on and ends with its exit code; ``stop`` and ``rm``
act by name. DOCKER_API_VERSION "deaf" makes a client that passes no signal on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def engine(folder: Path) -> None:
    """Start what is asked for in ``NAME.start``; its exit code goes to ``NAME.exit``."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        (folder / "engine.pid").write_text(str(os.getpid()))
        while True:
            for asked in folder.glob("*.start"):
                call = json.loads(asked.read_text())
                asked.unlink()
                with (folder / f"{asked.stem}.out").open("wb") as log:
                    running[asked.stem] = subprocess.Popen(
                        call["argv"], env=call["env"], stdout=log, stderr=log, start_new_session=True
                    )
                (folder / f"{asked.stem}.pid").write_text(str(running[asked.stem].pid))
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                (folder / f"{name}.pid").unlink(missing_ok=True)
                (folder / f"{name}.exit").write_text(str(code if code >= 0 else 128 - code))
            time.sleep(0.02)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)


def run(folder: Path, words: list[str]) -> int:
    options = [word for word in words if word.startswith("--")]
    options = options[: next(index for index, word in enumerate(words) if not word.startswith("--"))]
    image, *arguments = words[len(options) :]
    given = [word.partition("=")[::2] for word in options]
    name = next(value for option, value in given if option == "--name")
    program = next(value for option, value in given if option == "--entrypoint")
    if image.startswith("no/"):
        sys.stderr.write(
            f"docker: Error response from daemon: pull access denied for {image}, repository does not exist\n"
        )
        return 125
    env = {"PATH": os.environ["PATH"], **dict(value.split("=", 1) for option, value in given if option == "--env")}
    (folder / f"{name}.tmp").write_text(json.dumps({"argv": [program, *arguments], "env": env}))
    (folder / f"{name}.tmp").rename(folder / f"{name}.start")

    def passed_on(number: int, _frame: object) -> None:
        if os.environ.get("DOCKER_API_VERSION") != "deaf":
            kill(folder, name, signal.Signals(number))

    signal.signal(signal.SIGTERM, passed_on)
    shown = 0
    while True:
        ended = (folder / f"{name}.exit").exists()
        output = folder / f"{name}.out"
        if output.exists():
            text = output.read_bytes()
            sys.stdout.buffer.write(text[shown:])
            sys.stdout.buffer.flush()
            shown = len(text)
        if ended:
            return int((folder / f"{name}.exit").read_text())
        time.sleep(0.02)


def kill(folder: Path, name: str, number: signal.Signals) -> bool:
    """Signal a container: SIGKILL takes all of its processes, whatever sessions they made, as a PID namespace does."""
    try:
        pid = int((folder / f"{name}.pid").read_text())
        if number is signal.SIGKILL:
            for descendant in below(pid):
                os.kill(descendant, number)
        os.kill(pid, number)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    return True


def below(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(entry.parent.name), *below(int(entry.parent.name))]
    return found


def main() -> int:
    if sys.argv[1] == "engine":
        engine(Path(sys.argv[2]))
    folder = Path(os.environ["DOCKER_HOST"].removeprefix("unix://"))
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    if sys.argv[1] == "run":
        return run(folder, sys.argv[2:])
    name = sys.argv[-1]
    known = kill(folder, name, signal.SIGTERM if sys.argv[1] == "stop" else signal.SIGKILL)
    grace = next((float(word.partition("=")[2]) for word in sys.argv if word.startswith("--time=")), 0.0)
    deadline = time.monotonic() + grace
    while known and sys.argv[1] == "stop" and (folder / f"{name}.pid").exists():
        if time.monotonic() > deadline:
            kill(folder, name, signal.SIGKILL)
        time.sleep(0.02)
    return 0 if known else 1


if __name__ == "__main__":
    sys.exit(main())
