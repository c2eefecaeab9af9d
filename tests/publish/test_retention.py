"""Old releases go; what readers get and what waits for them stays, however old."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantmint.pipeline.publish.destination import ListedRelease, outdated


def made(day: int, *, current: bool = False, candidate: bool = False, zone: str = "+00:00") -> ListedRelease:
    return ListedRelease(f"v202611{day:02}-{day:08}", "", f"2026-11-{day:02}T12:00:00{zone}", "", current, candidate)


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
        pytest.param(
            [replace(made(2), created=made(1).created), made(1, current=True)],
            1,
            [2],
            id="of one judgement the current",
        ),
    ],
)
def test_what_goes(releases: list[ListedRelease], keep: int, gone: list[int]) -> None:
    assert [int(release.tag[-2:]) for release in outdated(releases, keep=keep)] == gone
