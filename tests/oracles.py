"""The bytes that tests find equal to what other libraries write or decode, counted for pytest's summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

EqualTo = Callable[[str, Mapping[str, Any], Mapping[str, Any]], None]
_PROPERTY = "bytes equal to"


def assert_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> int:
    """Assert that tensors have the same names, dtypes, shapes and bytes; return the number of bytes."""
    import torch

    assert ours.keys() == theirs.keys()
    total = 0
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        different = tensor.reshape(-1).view(torch.uint8) != other.reshape(-1).view(torch.uint8)
        assert not different.any(), f"{name}: {int(different.sum())} of {different.numel()} bytes differ"
        total += different.numel()
    assert total > 0
    return total


@pytest.fixture
def equal_to(record_property: Callable[[str, object], None]) -> EqualTo:
    """``equal_to(oracle, ours, theirs)`` is `assert_equal` with another library, whose bytes the summary counts."""
    return lambda oracle, ours, theirs: record_property(_PROPERTY, [oracle, assert_equal(ours, theirs)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say for each oracle how many bytes were compared and equal, in how many comparisons."""
    sizes: Counter[str] = Counter()
    comparisons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "call":
                oracle, total = value
                sizes[oracle] += total
                comparisons[oracle] += 1
    if sizes:
        terminalreporter.section("bytes equal to those of other libraries")
    for oracle in sorted(sizes):
        terminalreporter.write_line(f"{sizes[oracle]:>12,} in {comparisons[oracle]:>2}  {oracle}")
