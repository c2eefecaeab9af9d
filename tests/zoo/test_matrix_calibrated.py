"""Every architecture of the zoo in one of the ways that need calibration, in turn: sound, or refused as documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.matrix import outcome
from tests.zoo.models import names
from tests.zoo.page import documented, written

pytestmark = pytest.mark.slow

COLUMNS = ("fp8_cache", "mxfp4_fp8", "mxfp4_gptq")


@pytest.mark.parametrize(("number", "name"), enumerate(names()))
def test_what_is_calibrated(zoo_root: Path, number: int, name: str) -> None:
    column = COLUMNS[number % 3]
    assert written(outcome(name, column, zoo_root)) == documented()[name][column]
