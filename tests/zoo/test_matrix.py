"""Every architecture of the zoo in every way: made and sound, or refused for the reason that docs/models.md gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.matrix import outcome
from tests.zoo.models import names
from tests.zoo.page import documented, written

pytestmark = pytest.mark.slow

COLUMNS = ("ptpc_fp8", "fp8_block", "mxfp4", "mxfp4_quark")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.parametrize("name", names())
def test_what_follows_from_the_weights_alone(sources: Path, name: str) -> None:
    assert {column: written(outcome(name, column, sources)) for column in COLUMNS} == {
        column: said for column, said in documented()[name].items() if column in COLUMNS
    }
