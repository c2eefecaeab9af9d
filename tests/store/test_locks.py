from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import StoreError
from quantmint.pipeline.store.locks import Lock, is_held

HOLD = """
from pathlib import Path
from quantmint.pipeline.store.locks import Lock
with Lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
COUNT = """
from pathlib import Path
from quantmint.pipeline.store.locks import Lock
counter = Path(sys.argv[1])
for _ in range(int(sys.argv[2])):
    with Lock(counter.with_suffix(".lock")):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.lock"


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def start(python: list[str], script: str, *args: object) -> subprocess.Popen[str]:
    command = [*python, script, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start_holder(python: list[str], path: Path) -> subprocess.Popen[str]:
    process = start(python, HOLD, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("", timeout=60)


def forge(path: Path, *, age_s: float, **changes: object) -> None:
    """Leave the lock file of another process."""
    lock = Lock(path)
    lock.acquire()
    holder = {**json.loads(path.read_bytes()), "token": os.urandom(4).hex(), **changes}
    lock.release()
    path.write_text(json.dumps(holder))
    then = time.time() - age_s
    os.utime(path, (then, then))


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_file_exists_only_while_the_lock_is_held(path: Path) -> None:
    with Lock(path) as lock:
        holder = json.loads(path.read_bytes())
        assert holder["pid"] == os.getpid()
        assert holder["host"] == socket.gethostname()
        assert list(path.parent.iterdir()) == [path]
        assert is_held(path, stale_after=60, now=time.time())
        lock.check()
    assert list(path.parent.iterdir()) == []
    assert not is_held(path, stale_after=60, now=time.time())


def test_a_second_object_of_the_same_process_waits(path: Path) -> None:
    told: list[str] = []
    with Lock(path):
        assert not Lock(path).acquire(on_wait=told.append, timeout=0.1)
    assert told[0].startswith(f"process {os.getpid()} on {socket.gethostname()} since ")
    assert len(told) == 1
    assert Lock(path).acquire(timeout=0)


def test_no_increment_is_lost(python: list[str], tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [start(python, COUNT, counter, 10) for _ in range(8)]
    for process in processes:
        assert process.wait(timeout=120) == 0
    assert counter.read_text() == "80"
    assert list(tmp_path.iterdir()) == [counter]


def test_a_killed_holder_frees_the_lock_at_once(python: list[str], path: Path) -> None:
    process = start_holder(python, path)
    assert not Lock(path).acquire(timeout=0)
    process.kill()
    # Not reaped yet: a zombie has a pid, but holds nothing.
    with Lock(path, heartbeat=100, stale_after=1000):
        assert list(path.parent.iterdir()) == [path]
    process.communicate()


def test_a_suspended_holder_on_this_machine_keeps_the_lock(python: list[str], path: Path) -> None:
    process = start_holder(python, path)
    process.send_signal(signal.SIGSTOP)
    os.utime(path, (0, 0))
    assert not Lock(path, heartbeat=0.01, stale_after=0.1).acquire(timeout=0.2)
    process.send_signal(signal.SIGCONT)
    end(process)
    assert not path.exists()


@pytest.mark.parametrize(
    "changes",
    [{"host": "elsewhere"}, {"boot": "another boot"}, {"namespace": "pid:[1]"}, {"boot": "", "namespace": ""}],
)
def test_another_machine_is_judged_by_its_heartbeat(path: Path, changes: dict[str, object]) -> None:
    forge(path, age_s=5, pid=dead_pid(), **changes)
    assert is_held(path, stale_after=60, now=time.time())
    assert not Lock(path, heartbeat=0.01, stale_after=60).acquire(timeout=0.1)
    assert not is_held(path, stale_after=1, now=time.time())
    assert Lock(path, heartbeat=0.01, stale_after=1).acquire(timeout=10)
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_keeps_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that stays would have it for weeks, and nobody else would."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = Lock(path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr("quantmint.pipeline.store.locks.os.link", full)
        lock.release()
    assert list(path.parent.iterdir()) == []


def test_a_reused_pid_is_another_process(path: Path) -> None:
    forge(path, age_s=0, pid=os.getpid(), born="1")
    with Lock(path, heartbeat=100, stale_after=1000) as lock:
        lock.check()


def test_a_heartbeat_keeps_a_long_holder(path: Path) -> None:
    with Lock(path, heartbeat=0.02, stale_after=1) as lock:
        os.utime(path, (0, 0))
        while path.stat().st_mtime == 0:
            time.sleep(0.01)
        lock.check()
        # What a process of another machine would go by:
        assert is_held(path, stale_after=1, now=time.time())


@pytest.mark.parametrize("stolen_by", ["another", "nobody"])
def test_the_holder_learns_that_its_lock_was_taken(path: Path, stolen_by: str) -> None:
    lock = Lock(path, heartbeat=0.02, stale_after=60)
    lock.acquire()
    if stolen_by == "another":
        forged = path.with_name("forged")
        forge(forged, age_s=0, host="elsewhere")
        forged.rename(path)
    else:
        path.unlink()
    while not lock.lost:
        time.sleep(0.01)
    with pytest.raises(StoreError, match="taken over"):
        lock.check()
    lock.release()
    assert path.exists() == (stolen_by == "another"), "a release must not free what others hold"


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_of_several_stealers_one_wins(path: Path, host: str) -> None:
    pid = dead_pid()
    inside: list[int] = []
    crowds: list[int] = []

    def steal(barrier: threading.Barrier, me: int) -> None:
        barrier.wait()
        with Lock(path, heartbeat=0.01, stale_after=600) as lock:
            inside.append(me)
            crowds.append(len(inside))
            lock.check()
            inside.remove(me)

    for _ in range(25):
        forge(path, age_s=3600, pid=pid, host=host)
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=steal, args=(barrier, me)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(path.parent.iterdir()) == []
    assert crowds == [1] * 100


def test_a_stealer_killed_at_any_step_blocks_nobody(
    path: Path, killed_at_every_step: Callable[[Callable[[], None]], Iterator[int]]
) -> None:
    def steal_and_free() -> None:
        with Lock(path):
            pass

    pid = dead_pid()
    forge(path, age_s=0, pid=pid)
    for _ in killed_at_every_step(steal_and_free):
        lock = Lock(path)
        assert lock.acquire(timeout=30)
        lock.check()
        lock.release()
        assert not path.exists()
        forge(path, age_s=0, pid=pid)


def test_a_forked_child_does_not_free_the_lock_of_its_parent(
    path: Path, child: Callable[[Callable[[], None], int], int]
) -> None:
    lock = Lock(path)
    lock.acquire()
    assert child(lock.release, 10_000) == 0
    lock.check()
    lock.release()


def test_a_filesystem_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        with pytest.raises(StoreError, match="no hard links"):
            Lock(path).acquire()
    assert list(path.parent.iterdir()) == []
