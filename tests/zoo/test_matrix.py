"""Every architecture of the zoo: made and sound, or refused for the reason that docs/models.md gives.

Of the ways that follow from the weights alone a model goes through two, and its neighbour in the table through the
others; `make zoo` takes all models through all ways.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.matrix import outcome
from tests.zoo.models import names
from tests.zoo.page import documented, written

pytestmark = pytest.mark.slow

PAIRS = (("ptpc_fp8", "mxfp4_quark"), ("fp8_block", "mxfp4"))


@pytest.mark.parametrize(("number", "name"), enumerate(names()))
def test_what_follows_from_the_weights_alone(zoo_root: Path, number: int, name: str) -> None:
    columns = PAIRS[number % 2]
    said = {column: documented()[name][column] for column in columns}
    assert {column: written(outcome(name, column, zoo_root)) for column in columns} == said
