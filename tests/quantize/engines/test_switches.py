"""What is set for a whole process is put back."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from quantmint.pipeline.quantize.engines.stream.schedule import many_small_workers
from quantmint.pipeline.quantize.model import builder

TRIM, MMAP = -1, -3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is asked of the C library."""
    seen: list[tuple[int, int]] = []
    library = SimpleNamespace(
        mallopt=lambda option, count: seen.append((option, count)), malloc_trim=lambda keep: seen.append((0, keep))
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    return seen


def test_malloc_is_as_before_after_workers(calls: list[tuple[int, int]]) -> None:
    threads = torch.get_num_threads()

    def work() -> None:
        with many_small_workers():
            assert {option for option, _ in calls} == {TRIM, MMAP}
            assert torch.get_num_threads() == 1
            calls.clear()
            raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        work()
    assert set(calls) == {(MMAP, 128 << 10), (TRIM, 128 << 10), (0, 0)}
    assert torch.get_num_threads() == threads


def test_what_the_process_was_started_with_counts(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4194304")
    with many_small_workers():
        calls.clear()
    assert {(TRIM, 4 << 20), (MMAP, 128 << 10)} <= set(calls)


def test_the_last_of_overlapping_users_puts_it_back(calls: list[tuple[int, int]]) -> None:
    threads = torch.get_num_threads()
    with many_small_workers():
        with many_small_workers():
            calls.clear()
        assert calls == []
        assert torch.get_num_threads() == 1
    assert calls
    assert torch.get_num_threads() == threads


def test_packages_that_were_hidden_can_be_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_HEAVY", ("wave", "sndhdr_of_nobody"))
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with pytest.raises(ImportError), builder.light_imports():
        importlib.import_module("wave")
    assert not {"wave", "sndhdr_of_nobody"} & sys.modules.keys()
    assert importlib.import_module("wave").__name__ == "wave"


def test_a_module_that_came_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_HEAVY", ("one_of_them", "other_of_them"))
    arrived = ModuleType("one_of_them")
    with builder.light_imports():
        monkeypatch.setitem(sys.modules, "one_of_them", arrived)
        del sys.modules["other_of_them"]
    assert sys.modules["one_of_them"] is arrived
