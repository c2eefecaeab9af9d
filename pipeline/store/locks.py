"""A lock file that holds between processes of one machine or of several that share a filesystem.

::

    with Lock(root / "quantize" / "3f2a.lock") as lock:
        ...                 # no other process is here
        lock.check()        # before a step that cannot be undone: raises if the lock was lost

There are no byte-range locks: shared filesystems implement them badly or not at all. The file is created complete, by a
hard link, and names its holder. On the holder's own machine (same boot, same pid namespace: containers share host
names) the process table decides whether the holder lives, so a killed holder frees the lock at once and a suspended one
keeps it. On other machines the heartbeat decides: the age of the file by the filesystem's own clock.

**Removing a dead holder's file.** After a waiter judges the file dead, another waiter may have replaced it by a live
one. So to remove a file with content C, a process first takes the claim on C, a lock file named after C's digest, and
then reads the file again. A release does the same. A claim whose owner died is taken over by the same rule, one level
deeper. One limit remains, as for every lease: a holder on another machine that is paused for longer than
``stale_after`` resumes while its successor holds the lock. `Lock.check` detects that.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from quantmint.pipeline.base.errors import StoreError
from quantmint.pipeline.base.machine import process_stat

HEARTBEAT_S = 5.0
STALE_AFTER_S = 60.0
_FIRST_POLL_S, _LAST_POLL_S = 0.02, 1.0
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class _Holder:
    """The process that holds a lock: enough to check whether it still runs, and to name it to a user who waits."""

    host: str
    boot: str
    namespace: str
    pid: int
    born: str
    token: str
    command: str
    since: str

    @classmethod
    def this_process(cls) -> _Holder:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        since = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(*_place(), pid, process_stat(pid)[1], secrets.token_hex(8), command, since)

    @classmethod
    def parse(cls, raw: bytes) -> _Holder | None:
        """Parse a lock file's content; None for content that this module did not write.

        Of such a file only the age can be judged.
        """
        try:
            holder = cls(**json.loads(raw))
        except (ValueError, TypeError):
            return None
        return holder if isinstance(holder.pid, int) else None

    def runs(self) -> bool | None:
        """Return whether the process is alive; None if this machine cannot know."""
        if not self.boot or (self.host, self.boot, self.namespace) != _place():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's: it exists
        state, born = process_stat(self.pid)
        # A killed child that its parent has not reaped keeps its pid; a reused pid has another time of birth.
        return state not in {"Z", "X"} and (not born or not self.born or born == self.born)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


@dataclass(frozen=True)
class _LockFile:
    """The content and heartbeat time of a lock file; the content identifies the lock, since it holds a random token."""

    raw: bytes
    mtime_ns: int

    @property
    def holder(self) -> _Holder | None:
        return _Holder.parse(self.raw)


def this_process() -> dict[str, str | int]:
    """Return the identity of this process in plain JSON, without its command line, for `runs_still`."""
    holder = asdict(_Holder.this_process())
    return {name: holder[name] for name in ("host", "boot", "namespace", "pid", "born")}


def runs_still(process: object) -> bool | None:
    """Return whether a process is alive, by its identity from `this_process`.

    None for a process of another machine, boot or container, and for data that is no such identity.
    """
    try:
        holder = _Holder(**process, token="", command="", since="")  # type: ignore[arg-type]
    except TypeError:
        return None
    return holder.runs() if isinstance(holder.pid, int) else None


def is_held(path: Path, *, stale_after: float = STALE_AFTER_S, now: float | None = None) -> bool:
    """Return whether a lock file looks held, without changing anything.

    If the holder's process cannot be judged here, its heartbeat must be at most ``stale_after`` seconds old. ``now`` is
    in seconds since the epoch.
    """
    lock_file = _look(path)
    if lock_file is None:
        return False
    runs = lock_file.holder.runs() if lock_file.holder else None
    now = time.time() if now is None else now
    return abs(now - lock_file.mtime_ns / 1e9) <= stale_after if runs is None else runs


class Lock:
    """A lock at ``path``, whose folder must exist. Not reentrant; two objects on one path exclude each other.

    ``heartbeat`` and ``stale_after`` are seconds. Raises `StoreError` where the filesystem has no hard links, and
    `OSError` where it cannot be written.
    """

    def __init__(self, path: Path, *, heartbeat: float = HEARTBEAT_S, stale_after: float = STALE_AFTER_S) -> None:
        if stale_after < 2 * heartbeat:
            raise ValueError(f"stale_after ({stale_after} s) must leave room for two heartbeats of {heartbeat} s")
        self.path = path
        self._heartbeat = heartbeat
        self._stale_after = stale_after
        self._fresh = path  # the name of what replaces a dead holder's file; set with each token
        self._raw = b""  # what our file says while we hold or want the lock
        self._pid = 0
        self._private: set[Path] = set()  # names that are ours alone
        self._shared: set[Path] = set()  # names that may carry our content: what an interrupt must take away
        self._suspects: dict[_LockFile, float] = {}
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> bool:
        """Return whether the heartbeat noticed that another process holds the lock now."""
        return self._lost.is_set()

    def acquire(self, *, on_wait: Callable[[str], None] | None = None, timeout: float | None = None) -> bool:
        """Wait until this object holds the lock; return False if ``timeout`` seconds pass first (None: wait for ever).

        ``on_wait`` is called with a description of each process that holds the lock meanwhile.
        """
        if self._raw:
            raise RuntimeError(f"{self.path} is already held by this object")
        deadline = None if timeout is None else time.monotonic() + timeout
        reported, pause = None, _FIRST_POLL_S
        try:
            probe = self._announce()
            while not self._seize(self.path, probe):
                lock_file = _look(self.path)
                if lock_file is not None and lock_file.raw != reported:
                    reported, pause = lock_file.raw, _FIRST_POLL_S
                    if on_wait is not None:
                        on_wait(str(lock_file.holder or "an unknown process"))
                if deadline is not None and time.monotonic() >= deadline:
                    self._withdraw()
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _LAST_POLL_S)
            probe.unlink()
            self._thread = threading.Thread(target=self._beat, name=f"heartbeat of {self.path.name}", daemon=True)
            self._thread.start()
        except BaseException:  # an interrupt as well: a lock of a process that lives on would block everyone
            self._withdraw()
            raise
        return True

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        if not self._raw or os.getpid() != self._pid:  # a forked child must not free what its parent holds
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._shared.discard(self.path)  # from here on only the owner of the claim may take it away
        try:
            lock_file = _look(self.path)
            if lock_file is not None and lock_file.raw == self._raw:
                with self._claimed(self.path, lock_file, self.path) as ours:
                    if ours:
                        self.path.unlink()
        except FileNotFoundError:
            pass  # taken over, then freed, by another
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            # No room for the claim's name. Kept, the file would bar everybody for as long as this process lives; and
            # as its heartbeat went on until now, nobody else is about to replace it.
            if not self.lost:
                self.path.unlink(missing_ok=True)
        finally:
            self._withdraw()

    def check(self) -> None:
        """Raise `StoreError` if another process took the lock over."""
        lock_file = None if self.lost else _look(self.path)
        if lock_file is None or lock_file.raw != self._raw:
            self._lost.set()
            raise StoreError(
                f"the lock {self.path} was taken over by another process: "
                f"this one was suspended or cut off from the disk for more than {self._stale_after:.0f} s",
                hint="run the same command again: it waits for the other process, or takes its result",
            )

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _announce(self) -> Path:
        """Write this lock's content to a private file and return its path.

        Every link to the lock is made from that file, and its time is the filesystem's clock.
        """
        holder = _Holder.this_process()
        self._stop, self._lost = threading.Event(), threading.Event()
        self._pid, self._suspects = holder.pid, {}
        probe = self.path.with_name(f"{self.path.name}.{holder.token}.probe")
        self._fresh = probe.with_suffix(".new")
        self._private, self._shared = {probe, self._fresh}, {self.path}
        self._raw = json.dumps(asdict(holder)).encode()
        probe.write_bytes(self._raw)
        return probe

    def _withdraw(self) -> None:
        for name in self._private:
            name.unlink(missing_ok=True)
        for name in self._shared:
            lock_file = _look(name)
            if lock_file is not None and lock_file.raw == self._raw:
                name.unlink(missing_ok=True)
        self._raw, self._private, self._shared = b"", set(), set()

    def _seize(self, path: Path, source: Path) -> bool:
        """Write this lock's content to ``path`` if that is free or a dead process's lock; return whether it worked.

        ``source`` is the private file from `_announce`.
        """
        os.utime(source)  # by the server's clock; what is linked below starts with a fresh heartbeat
        now_ns = source.stat().st_mtime_ns
        if _link(source, path):
            return True
        lock_file = _look(path)
        if lock_file is None:
            return False
        if lock_file.raw == self._raw:
            return True  # the link was made, and its answer was lost on the way from the server
        if not self._dead(lock_file, now_ns):
            return False
        with self._claimed(path, lock_file, source) as ours:
            if ours:
                self._fresh.write_bytes(self._raw)
                self._fresh.replace(path)
            return ours

    @contextmanager
    def _claimed(self, path: Path, lock_file: _LockFile, source: Path) -> Iterator[bool]:
        """Within the block, hold the sole right to remove or replace ``lock_file`` at ``path``.

        Yields whether the right was granted.
        """
        claim = path.with_name(f"{path.name}.{hashlib.sha256(lock_file.raw).hexdigest()[:16]}")
        self._shared.add(claim)
        if not self._seize(claim, source):
            yield False
            return
        try:
            again = _look(path)
            yield again is not None and again.raw == lock_file.raw
        finally:
            claim.unlink(missing_ok=True)

    def _dead(self, lock_file: _LockFile, now_ns: int) -> bool:
        runs = lock_file.holder.runs() if lock_file.holder else None
        if runs is not None:
            return not runs
        age_s = (now_ns - lock_file.mtime_ns) / 1e9
        if abs(age_s) <= self._stale_after:
            return False
        # A server that was away has aged every heartbeat at once: the holder gets the time of one more. So it does
        # where the clock was put back, or no heartbeat of a clock that once was years ahead would ever grow old.
        first = self._suspects.setdefault(lock_file, time.monotonic())
        return time.monotonic() - first >= (self._heartbeat if age_s > 0 else max(self._heartbeat, HEARTBEAT_S))

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat):
            try:
                lock_file = _look(self.path)
                if lock_file is None or lock_file.raw != self._raw:
                    self._lost.set()
                    return
                os.utime(self.path)
            except OSError:
                continue  # the disk is away: the next beat says whether the lock outlived that


def _link(source: Path, path: Path) -> bool:
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise StoreError(
                f"the filesystem of {path.parent} has no hard links, which the locks need ({error.strerror})",
                hint="put the store on a local disk, NFS, Lustre, GPFS or the like",
            ) from error
        raise
    return True


def _look(path: Path) -> _LockFile | None:
    # Opening asks an NFS server anew; stat alone may answer from a cache a minute old, and a heartbeat look stale.
    try:
        with path.open("rb") as file:
            return _LockFile(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # removed by another machine while we read
            return None
        raise


def _place() -> tuple[str, str, str]:
    """Return host, boot id and pid namespace: a pid means the same process only where all three agree."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = namespace = ""
    return socket.gethostname(), boot, namespace
