"""What is known of a recipe between rounds: written whole, read by anybody, never in the way."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.pipeline.upkeep.fleet.records import RecipeState, all_states, read_state, state_path, write_state

TIMES = st.none() | st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat)
STATES = st.builds(
    RecipeState,
    name=st.just("llama3.1-8b"),
    last_attempt=TIMES,
    last_success=TIMES,
    last_verdict=st.sampled_from([None, "PASS", "FAIL"]),
    last_exit=st.none() | st.integers(0, 5),
    last_duration_s=st.none() | st.floats(0, 1e6),
    attempts_failed=st.integers(0, 99),
    tag=st.none() | st.text(max_size=20),
    released=TIMES,
    reason=st.text(st.characters(exclude_categories=("Cs",)), max_size=50),
)


@given(STATES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, state: RecipeState) -> None:
    root = tmp_path_factory.getbasetemp() / "states"
    write_state(root, state)
    assert read_state(root, state.name, warn=pytest.fail) == state
    assert all_states(root, warn=pytest.fail) == {state.name: state}
    assert [path.name for path in (root / "refresh").iterdir()] == [f"{state.name}.json"]


def test_none_yet(tmp_path: Path) -> None:
    assert read_state(tmp_path, "a", warn=pytest.fail) == RecipeState(name="a")
    assert all_states(tmp_path, warn=pytest.fail) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"schema": 2, "name": "a"}',
        '{"schema": 1, "name": "b"}',
        '{"schema": 1, "name": "a", "attempts_failed": true}',
    ],
    ids=repr,
)
def test_a_file_that_is_none_is_told_and_written_anew(tmp_path: Path, content: str) -> None:
    path = state_path(tmp_path, "a")
    path.parent.mkdir()
    path.write_text(content)
    told: list[str] = []
    assert read_state(tmp_path, "a", warn=told.append) == RecipeState(name="a")
    assert [str(path) in one for one in told] == [True]
    write_state(tmp_path, RecipeState(name="a", attempts_failed=2))
    assert read_state(tmp_path, "a", warn=pytest.fail).attempts_failed == 2


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    write_state(tmp_path, RecipeState(name="a", attempts_failed=2))
    path = state_path(tmp_path, "a")
    path.write_text(json.dumps({**json.loads(path.read_text()), "mood": "good"}))
    assert read_state(tmp_path, "a", warn=pytest.fail).attempts_failed == 2
