"""Old releases go; what readers get and what waits for them stays, however old."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pipeline.publish.place import Listed, outdated

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def made(day: int, *, current: bool = False, candidate: bool = False, zone: str = "+00:00") -> Listed:
    return Listed(f"v202611{day:02}-{day:08}", "", f"2026-11-{day:02}T12:00:00{zone}", "", current, candidate)


def days(releases: list[Listed], **policy: object) -> list[int]:
    return [int(tag[-2:]) for tag in outdated(releases, **policy)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("releases", "keep", "gone"),
    [
        pytest.param([made(3, current=True), made(2), made(1)], 1, [2, 1], id="the newest stays"),
        pytest.param([made(1), made(3, current=True), made(2)], 2, [1], id="in any order"),
        pytest.param([made(3, current=True), made(2)], 2, [], id="few enough"),
        pytest.param([], 1, [], id="none"),
        pytest.param([made(3), made(2), made(1, current=True)], 1, [2], id="rolled back: the current one stays"),
        pytest.param(
            [made(4, candidate=True), made(3, current=True), made(2)], 1, [2], id="a candidate is not counted"
        ),
        pytest.param([made(3, current=True), made(2), made(1, candidate=True)], 1, [2], id="nor does it go"),
        pytest.param([made(3), made(2)], 1, [2], id="nothing is current"),
    ],
)
def test_what_goes(releases: list[Listed], keep: int, gone: list[int]) -> None:
    assert days(releases, keep=keep) == gone


def test_only_what_is_old_enough() -> None:
    releases = [made(day) for day in (29, 28, 20, 10)]
    assert days(releases, keep=1, older_than=timedelta(days=5), now=NOW) == [20, 10]
    assert days(releases, keep=3, older_than=timedelta(days=5), now=NOW) == [10]
    assert days(releases, keep=1, older_than=timedelta(0), now=NOW) == [28, 20, 10]
