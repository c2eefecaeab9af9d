"""A real Ray of several nodes on this machine: for the tests of one file, which leave nothing of it behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.ray.lean import lean_nodes

# Before Ray is imported: a busy machine takes longer than half a minute to start a node.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
if find_spec("ray") is None:  # and not imported: whoever collects tests would wait for it
    pytest.skip("ray is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[3]
SECRET = "QUANTMINT_TEST_API_KEY"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "60",  # for a client's server; one that hangs is asked for once more
    SECRET: "of the shell of Ray",
}
_SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}


class Told:
    """What a person would have read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def bar(self, total: int, unit: str) -> Any:
        return nullcontext(lambda count: None)

    def say(self, message: str) -> None:
        self.lines.append(message)

    def warn(self, message: str) -> None:
        self.lines.append(message)


class Nodes:
    """The head, which the driver is on, and workers that come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=True)
        with socket.socket() as free:
            free.bind(("", 0))
            self._port = int(free.getsockname()[1])

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def client(self) -> str:
        """Where the head serves drivers that are on none of its nodes."""
        return f"ray://127.0.0.1:{self._port}"

    def at_least(self, count: int) -> None:
        while len(self._cluster.list_all_nodes()) < count:
            self.add()

    def add(self, **options: Any) -> Any:
        head = {} if self._cluster.head_node else {"include_dashboard": False, "ray_client_server_port": self._port}
        with lean_nodes():
            return self._cluster.add_node(**{**_SMALL, **head, **options})

    def remove(self, node: Any) -> None:
        """By SIGKILL, as a machine goes that loses its power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_one(self) -> None:
        self.remove(next(iter(self._cluster.worker_nodes)))

    def lose_what_runs(self, process: int, works: Callable[[], bool]) -> bool:
        """Lose the node that a process is of, and the process; False where that is the head, or it has done its work.

        It is stopped first: a worker notices late that its node is gone, and may be ready before.
        """
        with suppress(FileNotFoundError, ProcessLookupError):
            parent = int(_state_of(process)[1])
            for node in self._cluster.worker_nodes:
                if parent in {each.process.pid for each in node.all_processes["raylet"]}:
                    os.kill(process, signal.SIGSTOP)
                    while _state_of(process)[0] == "R":
                        pass
                    if works():
                        self.remove(node)
                        os.kill(process, signal.SIGKILL)
                        return True
                    os.kill(process, signal.SIGCONT)
        return False

    def close(self) -> None:
        self._cluster.shutdown()


def _state_of(process: int) -> list[str]:
    """The fields of proc(5)'s stat from the state on: "R" runs, "T" is stopped; then the parent."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three nodes of one CPU each; ``--on ray`` finds them."""
    import ray

    # A path of a socket below it must not be longer than 107 characters.
    folder = tempfile.mkdtemp(prefix="qm-ray-", dir="/tmp")
    with _environment(RAY_TMPDIR=folder, **_ENVIRONMENT):
        made = Nodes()
        try:
            made.at_least(3)
            with _environment(RAY_ADDRESS=made.address):
                os.environ.pop(SECRET)
                yield made
        finally:
            ray.shutdown()
            made.close()
            left = _left(folder)
            shutil.rmtree(folder, ignore_errors=True)
    assert left == {}


def _left(folder: str) -> dict[int, str]:
    """Processes of the session that outlive it, by then ended: its folder's name is in no other's command."""
    deadline = time.monotonic() + 20
    while (found := _of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return found


def _of(folder: str) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if folder in words:
            found[int(entry.name)] = words
    return found
