"""Two models with known scores, served on known machines, for the tests of the gate and its record."""

from __future__ import annotations

import pytest

from quantmint.eval.gate import Policy
from quantmint.eval.measurements import Measurements
from tests.eval.measured import good_measurements


@pytest.fixture
def measurements() -> Measurements:
    """A good candidate: no loss beyond a point, a quarter faster."""
    return good_measurements()


@pytest.fixture
def policy() -> Policy:
    return Policy(margins={"tiny_facts": 0.01, "tiny_arithmetic": 0.04}, min_ratio=1.0, launches=4, hardware="mi300x")
