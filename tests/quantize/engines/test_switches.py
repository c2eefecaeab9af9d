"""What is set for a whole process is put back."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from quantmint.pipeline.quantize.engines.stream.switches import LAYERS_BYTES, keeping_freed_memory, many_small_workers
from quantmint.pipeline.quantize.model import builder

TRIM, MMAP = -1, -3
TINY = Path(__file__).parents[3] / "recipes" / "tiny" / "model"


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


def test_workers_leave_the_thresholds_of_the_loop_that_calls_them(calls: list[tuple[int, int]]) -> None:
    """GPTQ's loop calls workers for each step; each time they reset malloc, forwards took a page fault every 4 KiB."""
    with keeping_freed_memory(LAYERS_BYTES):
        assert (TRIM, LAYERS_BYTES) in calls
        calls.clear()
        with many_small_workers():
            pass
        assert calls == []
    assert (TRIM, 128 << 10) in calls


def test_packages_that_were_hidden_can_be_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_HEAVY", ("wave", "sndhdr_of_nobody"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with pytest.raises(ImportError), builder.light_imports():
        importlib.import_module("wave")
    assert not {"wave", "sndhdr_of_nobody"} & sys.modules.keys()
    assert importlib.import_module("wave").__name__ == "wave"


def test_a_module_that_came_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_HEAVY", ("one_of_them", "other_of_them"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    arrived = ModuleType("one_of_them")
    with builder.light_imports():
        monkeypatch.setitem(sys.modules, "one_of_them", arrived)
        del sys.modules["other_of_them"]
    assert sys.modules["one_of_them"] is arrived


def _printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_model_is_built_without_the_packages_of_other_features() -> None:
    code = f"""
import sys
from pathlib import Path
from quantmint.pipeline.quantize.model.builder import meta_model
model = meta_model(Path({str(TINY)!r}))
print(type(model).__name__, *({{"scipy", "sklearn", "trio", "boto3"}} & sys.modules.keys()))
from scipy.optimize import linear_sum_assignment
print(linear_sum_assignment.__name__)
"""
    assert _printed(code) == ["LlamaForCausalLM", "linear_sum_assignment"]


def test_a_model_is_built_where_transformers_was_told_of_the_packages() -> None:
    code = f"""
from pathlib import Path
from transformers.utils import is_scipy_available, is_sklearn_available
from quantmint.pipeline.quantize.model.builder import meta_model
there = is_scipy_available(), is_sklearn_available()
print(*there, type(meta_model(Path({str(TINY)!r}))).__name__)
"""
    assert _printed(code) == ["True", "True", "LlamaForCausalLM"]


@pytest.mark.parametrize(("before", "after"), [("", "True"), ("gc.disable()", "False")])
def test_torch_is_imported_without_garbage_collection(before: str, after: str) -> None:
    code = f"""
import gc, sys
from quantmint.calibration.lazy import torch
{before}
collected = []
gc.callbacks.append(lambda phase, info: collected.append("torch" in sys.modules))
torch.float32
print(any(collected), gc.isenabled(), gc.get_freeze_count() > 0)
"""
    assert _printed(code) == ["False", after, after]
