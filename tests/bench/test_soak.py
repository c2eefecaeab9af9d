"""A soak of three rounds, and the bounds of a long one on series that break them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from tests.bench.soak import Round, broken, soak

GOOD = Round(
    moved="seed", fate="whole", killed_after=None, seconds=8.0, state="ended with 0", processes=0, locks=0,
    store=6 << 20, files=90, temporary=1,
)  # fmt: skip


@pytest.mark.slow
def test_three_rounds_leave_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    series = soak(tmp_path, rounds=3, seed=1, tell=told.append)
    assert [one.fate for one in series] == ["whole", "fleet", "whole"], told
    assert broken(series) == []


def test_what_does_not_grow_is_sound() -> None:
    assert broken([GOOD] * 20) == []


@pytest.mark.parametrize(
    ("bound", "bad"),
    [("processes", 1), ("locks", 1), ("store", 1 << 30), ("files", 900)],
)
def test_what_grows_breaks_its_bound(bound: str, bad: int) -> None:
    (fault,) = broken([*[GOOD] * 19, replace(GOOD, **{bound: bad})])
    assert fault.startswith(bound)


def test_the_last_round_has_to_pass() -> None:
    (fault,) = broken([GOOD, replace(GOOD, state="failed")])
    assert "failed" in fault
