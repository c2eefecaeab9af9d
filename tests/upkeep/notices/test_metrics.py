from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.upkeep.fleet.records import Ended, RecipeState, state_path, write_state
from quantmint.pipeline.upkeep.notices import Notices

Make = Callable[..., Ended]
Samples = dict[tuple[str, ...], float]
AT = "2026-03-28T02:00:00+00:00"
EPOCH = datetime.fromisoformat(AT).timestamp()


def shown(store: Path) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families((store / "quantmint.prom").read_text(encoding="utf-8")):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name.removeprefix("quantmint_"), *(sample.labels[name] for name in sorted(sample.labels)))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_state(
        tmp_path,
        RecipeState(
            name="good", last_attempt=AT, last_success=AT, last_verdict="PASS", last_exit=0, last_duration_s=12.5,
            released=AT, tag="v1",
        ),
    )  # fmt: skip
    write_state(tmp_path, RecipeState(name="bad", last_attempt=AT, last_verdict="FAIL", attempts_failed=3))
    return tmp_path


def metrics(store: Path, warn: Callable[[str], None] = pytest.fail) -> Notices:
    return Notices(store, store / "quantmint.prom", warn, {})


def test_what_the_store_knows_of_each_recipe(store: Path) -> None:
    metrics(store)
    found = shown(store)
    assert found["last_success_timestamp_seconds", "good"] == found["last_attempt_timestamp_seconds", "bad"] == EPOCH
    assert ("last_success_timestamp_seconds", "bad") not in found  # never: no number says that
    assert found["last_duration_seconds", "good"] == 12.5
    assert found["release_timestamp_seconds", "good"] == EPOCH
    assert (found["attempts_failed", "good"], found["attempts_failed", "bad"]) == (0, 3)
    verdicts = {key[1:]: value for key, value in found.items() if key[0] == "last_verdict"}
    assert len(verdicts) == 8
    assert {key for key, value in verdicts.items() if value} == {("good", "PASS"), ("bad", "FAIL")}


def test_which_releases_are_damaged(store: Path, ended: Make) -> None:
    ours = metrics(store)
    ours(ended("broken", state="broken"))
    ours(ended("good", state="damaged"))
    ours(ended("good"))
    ours(ended("unasked", state="unknown"))
    ours(ended('äw"\\y', state="damaged", exit_code=5))
    ours(ended("fresh", state="current"))
    found = shown(store)
    damaged = {key[1]: value for key, value in found.items() if key[0] == "release_damaged"}
    assert damaged == {"good": 0, 'äw"\\y': 1, "fresh": 0}
    assert {path.name for path in store.iterdir()} == {"refresh", "quantmint.prom"}  # nothing half written is left


def test_every_metric_is_documented_and_every_alert_uses_what_there_is(store: Path) -> None:
    metrics(store)
    page = (Path(__file__).parents[3] / "docs/notices.md").read_text(encoding="utf-8")
    text = (store / "quantmint.prom").read_text(encoding="utf-8")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {line.split("`")[1].split("{")[0] for line in page.splitlines() if line.startswith("| `quantmint_")} == names
    (group,) = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["groups"]
    for rule in group["rules"]:
        assert {word for word in rule["expr"].replace("{", " ").split() if word.startswith("quantmint_")} <= names


def test_a_damaged_state_hides_no_other_metric(store: Path) -> None:
    told: list[str] = []
    state_path(store, "bad").write_text("{", encoding="utf-8")
    metrics(store, told.append)
    assert shown(store)["last_duration_seconds", "good"] == 12.5
    assert len(told) == 1


@pytest.mark.parametrize(
    ("path", "said"), [("metrics.txt", "files that end in .prom"), ("none/quantmint.prom", "No such file or directory")]
)
def test_a_file_that_nobody_would_read_is_refused(store: Path, path: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Notices(store, store / path, pytest.fail, {})


def test_a_disk_that_is_full_is_told_and_holds_up_nothing(store: Path, ended: Make) -> None:
    told: list[str] = []
    folder = store / "metrics"
    folder.mkdir()
    path = folder / "quantmint.prom"
    ours = Notices(store, path, told.append, {})
    path.unlink()
    folder.rmdir()
    ours(ended())
    assert told == [f"the metrics file {path} cannot be written: No such file or directory"]
