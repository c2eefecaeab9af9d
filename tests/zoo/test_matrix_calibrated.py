"""Every architecture of the zoo in one of the ways that need calibration, in turn: sound, or refused as documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.matrix import outcome
from tests.zoo.models import names
from tests.zoo.page import documented, written

pytestmark = pytest.mark.slow

COLUMNS = ("fp8_cache", "mxfp4_fp8", "mxfp4_gptq")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.parametrize(("number", "name"), enumerate(names()))
def test_what_is_calibrated(sources: Path, number: int, name: str) -> None:
    column = COLUMNS[number % 3]
    assert written(outcome(name, column, sources)) == documented()[name][column]
