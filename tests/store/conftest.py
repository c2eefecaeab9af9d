from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.tree import Store

ROOT = Path(__file__).parents[2]
STEPS = ("fsync", "rename", "replace", "link", "unlink", "open", "mkdir", "rmdir", "utime")


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, warnings: list[str]) -> Store:
    return Store(tmp_path / "store", on_warning=warnings.append)


def payload_of(number: int, stage: str = "quantize") -> dict[str, object]:
    return {"stage": stage, "version": 1, "inputs": {"source": "ab" * 32}, "recipe": {"number": number}}


@pytest.fixture
def make() -> Callable[..., Entry]:
    """Make an entry, or find it."""

    def make(store: Store, number: int = 1, stage: str = "quantize", files: dict[str, bytes] | None = None) -> Entry:
        payload = payload_of(number, stage)
        with store.working(stage, fingerprint(payload)) as work:
            if work.existing is not None:
                return work.existing
            for name, data in (files or {"a.bin": b"alpha", "sub/b.bin": b"beta" * 10}).items():
                path = work.path / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            started = datetime.now(UTC)
            return work.commit(payload=payload, result={"n": number}, started=started, tools={"torch": "2.10.0"})

    return make


@pytest.fixture
def child() -> Callable[[Callable[[], None], int], int]:
    """Run a function in a forked process that is killed before its n-th step on the disk; 0 if it came to its end."""

    def run(function: Callable[[], None], fatal_step: int) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _kill_at(fatal_step)
                function()
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        return os.waitstatus_to_exitcode(status)

    return run


@pytest.fixture
def killed_at_every_step(
    child: Callable[[Callable[[], None], int], int],
) -> Callable[[Callable[[], None]], Iterator[int]]:
    """Yield after each kill of the function, one disk step later every time, until it comes to its end."""

    def every(function: Callable[[], None]) -> Iterator[int]:
        for step in range(1, 500):
            code = child(function, step)
            assert code in {0, -signal.SIGKILL}
            yield step
            if code == 0:
                assert step > 5, "the steps were not counted"
                return
        raise AssertionError("no end")

    return every


def _kill_at(fatal_step: int) -> None:
    count = 0

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == fatal_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return step

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    io.open = counted(io.open)  # type: ignore[assignment]


@pytest.fixture
def python() -> list[str]:
    """Start of a command line that runs a script given as the next argument, with the packages importable."""
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); exec(sys.argv.pop(1))"]
