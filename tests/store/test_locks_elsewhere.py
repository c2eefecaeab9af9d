"""Two machines and one lock: processes in namespaces of their own, which see neither each other's pids nor host names.

By themselves these run on a folder of this machine. ``QUANTMINT_TEST_MOUNTS="/mnt/one /mnt/two"`` names a folder of a
shared filesystem as two clients have mounted it; a client may know times of files as they were a second ago, so
heartbeats are slower there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quantmint.pipeline.store.locks import Lock

TURNS = 100
ENTER = """
import socket, sys
from pathlib import Path
from quantmint.pipeline.store.locks import Lock
folder = Path(sys.argv[1])
for turn in range(int(sys.argv[2])):
    with Lock(folder / "x.lock"):
        (folder / "inside").mkdir()  # refused where somebody is: what no client caches
        (folder / f"{socket.gethostname()}-{turn}").touch()
        (folder / "inside").rmdir()
"""
HOLD = """
import sys, time
from pathlib import Path
from quantmint.pipeline.store.locks import Lock
beat = float(sys.argv[2])
with Lock(Path(sys.argv[1]) / "x.lock", heartbeat=beat, stale_after=10 * beat):
    print("held", flush=True)
    time.sleep(600)
"""
Elsewhere = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One folder, as each of two machines sees it."""
    mounts = os.environ.get("QUANTMINT_TEST_MOUNTS", f"{tmp_path} {tmp_path}").split()
    name = f"locks-{uuid.uuid4().hex}"
    one, two = (Path(mount) / name for mount in mounts)
    one.mkdir()
    two.mkdir(exist_ok=True)  # as a store does: a client may not know yet what another has made
    yield one, two
    shutil.rmtree(one)


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    """Start a script on a machine of its own."""
    apart = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here: that takes root and `unshare`")
    running: list[subprocess.Popen[str]] = []

    def start(name: str, script: str, *arguments: object) -> subprocess.Popen[str]:
        renamed = f"import socket; socket.sethostname({name!r})\n{script}"
        command = [*apart, sys.executable, "-c", renamed, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_never_are_two_inside(clients: tuple[Path, Path], elsewhere: Elsewhere) -> None:
    entering = [elsewhere(f"m{number}", ENTER, folder, TURNS) for number, folder in enumerate(clients)]
    assert [process.wait(120) for process in entering] == [0, 0]
    left = {path.name for path in clients[0].iterdir()}
    assert left == {f"m{number}-{turn}" for number in (0, 1) for turn in range(TURNS)}


def test_a_machine_that_dies_is_succeeded_when_its_heartbeat_is_old(
    clients: tuple[Path, Path], elsewhere: Elsewhere
) -> None:
    beat = 1.0 if "QUANTMINT_TEST_MOUNTS" in os.environ else 0.1
    holder = elsewhere("m0", HOLD, clients[0], beat)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    successor = Lock(clients[1] / "x.lock", heartbeat=beat, stale_after=10 * beat)
    assert not successor.acquire(timeout=15 * beat)  # it is alive, and this machine cannot see its process
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    died = time.monotonic()
    told: list[str] = []
    assert successor.acquire(on_wait=told.append, timeout=600 * beat)
    assert time.monotonic() - died >= 5 * beat  # not by a guess: the heartbeat had to grow old
    successor.release()
    (waited_for,) = told
    assert " on m0 since " in waited_for
