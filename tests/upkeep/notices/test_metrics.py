from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.upkeep.fleet.events import Event, RecipeState, state_path, write_state
from quantmint.pipeline.upkeep.notices import Metrics, outlets

Make = Callable[..., Event]
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


def metrics(store: Path, warn: Callable[[str], None] = pytest.fail) -> Metrics:
    return Metrics(store / "quantmint.prom", store, warn=warn)


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
    assert (found["queue_length",], found["running",]) == (0, 0)
    assert not [key for key in found if key[0].startswith(("python_", "process_"))]  # nothing but what is ours


def test_what_a_round_tells_while_it_works(store: Path, event: Make) -> None:
    ours = metrics(store)
    for told in (
        event("queued", "good", queued=1),
        event("queued", "bad", queued=2),
        event("queued", "broken", queued=3),
        event("started", "good", queued=2, running=1),
        event("finished", "broken", queued=1, running=1, state="broken"),
        event("finished", "good", queued=1, state="ran"),
        event("started", "bad", running=1),
        event("stage", "bad", running=1, stage="1/9 source"),
        event("finished", "bad", state="failed"),
        event("finished", "recipes/path.yaml", state="failed"),  # nobody could look at it: it has no name yet
        event("finished", "unasked", state="unknown"),
        event("finished", "away", state="damaged", exit_code=5),
        event("finished", "fresh", state="current", queued=4, running=5),
    ):
        ours.hear(told)
    found = shown(store)
    damaged = {key[1]: value for key, value in found.items() if key[0] == "release_damaged"}
    assert damaged == {"good": 0, "away": 1, "fresh": 0}
    assert (found["queue_length",], found["running",]) == (4, 5)
    assert {one.name for one in store.iterdir()} == {"refresh", "quantmint.prom"}  # nothing half written is left


def test_every_metric_is_documented_and_every_alert_uses_what_there_is(store: Path, event: Make) -> None:
    ours = metrics(store)
    ours.hear(event("queued", "bad"))
    page = (Path(__file__).parents[3] / "docs/notices.md").read_text(encoding="utf-8")
    text = (store / "quantmint.prom").read_text(encoding="utf-8")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {line.split("`")[1].split("{")[0] for line in page.splitlines() if line.startswith("| `quantmint_")} == names
    (group,) = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["groups"]
    for rule in group["rules"]:
        assert {word for word in rule["expr"].replace("{", " ").split() if word.startswith("quantmint_")} <= names


def test_a_damaged_state_hides_no_other_metric_and_is_told_once(store: Path, event: Make) -> None:
    told: list[str] = []
    state_path(store, "bad").write_text("{", encoding="utf-8")
    ours = metrics(store, told.append)
    ours.hear(event("queued", "good", queued=1))
    assert shown(store)["queue_length",] == 1
    assert len(told) == 1


@pytest.mark.parametrize(
    ("path", "said"), [("metrics.txt", "files that end in .prom"), ("none/quantmint.prom", "No such file or directory")]
)
def test_a_file_that_nobody_would_read_is_refused(store: Path, path: str, said: str) -> None:
    with pytest.raises(UserError, match=said), outlets(store, warn=print, metrics_file=store / path, environ={}):
        pass


def test_a_disk_that_is_full_is_told_once(store: Path, event: Make) -> None:
    told: list[str] = []
    folder = store / "metrics"
    folder.mkdir()
    path = folder / "quantmint.prom"
    ours = Metrics(path, store, warn=told.append)
    path.unlink()
    folder.rmdir()
    for _ in range(2):
        ours.hear(event("queued", "bad"))
    assert told == [f"the metrics file {path} cannot be written: No such file or directory"]
