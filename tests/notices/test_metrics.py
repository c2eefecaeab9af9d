from __future__ import annotations

import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.errors import UserError
from pipeline.fleet.events import Event
from pipeline.notices.exposition import Textfile
from pipeline.notices.metrics import Board
from pipeline.notices.outlets import outlets
from pipeline.refresh.state import RecipeState, state_path, write_state

Make = Callable[..., Event]
Samples = dict[tuple[str, ...], float]
AT = "2026-03-28T02:00:00+00:00"
EPOCH = datetime.fromisoformat(AT).timestamp()


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name.removeprefix("quantmint_"), *(sample.labels[name] for name in sorted(sample.labels)))
            assert key not in found
            found[key] = sample.value
    return found


def shown(board: Board) -> Samples:
    return samples(generate_latest(board.registry).decode())


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


def board(store: Path, told: list[str] | None = None) -> Board:
    return Board(store, warn=(told if told is not None else []).append, clock=lambda: EPOCH + 60)


def test_what_the_store_knows_of_each_recipe(store: Path) -> None:
    found = shown(board(store))
    assert found["last_success_timestamp_seconds", "good"] == found["last_attempt_timestamp_seconds", "bad"] == EPOCH
    assert ("last_success_timestamp_seconds", "bad") not in found  # never: no number says that
    assert found["last_duration_seconds", "good"] == 12.5
    assert found["release_age_seconds", "good"] == 60
    assert (found["attempts_failed", "good"], found["attempts_failed", "bad"]) == (0, 3)
    verdicts = {key[1:]: value for key, value in found.items() if key[0] == "last_verdict"}
    assert len(verdicts) == 8
    assert {key for key, value in verdicts.items() if value} == {("good", "PASS"), ("bad", "FAIL")}
    assert (found["queue_length",], found["running",]) == (0, 0)


def test_what_a_round_tells_while_it_works(store: Path, event: Make) -> None:
    ours = board(store)
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
        event("finished", "unasked", state="failed"),
        event("finished", "unasked", state="unknown"),
        event("finished", "fresh", state="current", queued=4, running=5),
    ):
        ours.hear(told)
    found = shown(ours)
    assert {key[1]: value for key, value in found.items() if key[0] == "due"} == {"good": 0, "bad": 1, "fresh": 0}
    assert (found["queue_length",], found["running",]) == (4, 5)


def test_what_nobody_could_look_at_is_not_due_for_ever(store: Path, event: Make) -> None:
    """It has no name yet: what is told is what somebody typed, which nothing that comes later is told of."""
    ours = board(store)
    ours.hear(event("finished", "recipes/good.yaml", state="failed", exit_code=5))
    ours.hear(event("finished", "recipes/bad.yaml", state="interrupted"))
    ours.hear(event("finished", "large", state="failed", exit_code=2, causes=("recipe",)))
    assert {key[1] for key in shown(ours) if key[0] == "due"} == {"large"}


def test_the_next_fire_goes_with_its_recipe(store: Path) -> None:
    ours = board(store)
    ours.plan({"good": EPOCH + 5, "bad": EPOCH + 6})
    ours.plan({"good": EPOCH + 7})
    fires = {key[1:]: value for key, value in shown(ours).items() if key[0] == "next_fire_timestamp_seconds"}
    assert fires == {("good",): EPOCH + 7}


def test_a_recipe_that_was_deleted_is_shown_no_more(store: Path, event: Make) -> None:
    """Not so one that nobody named this time, whose folder is away, or of which nobody knows where it stood."""
    folder = store / "recipes"
    folder.mkdir()
    for name in ("kept", "deleted", "moved"):
        write_state(store, RecipeState(name=name, file=str(folder / f"{name}.yaml"), last_attempt=AT))
    write_state(store, RecipeState(name="away", file=str(store / "not mounted" / "away.yaml"), last_attempt=AT))
    (folder / "kept.yaml").touch()
    ours = board(store)
    ours.hear(event("finished", "moved", state="current"))  # to another folder: it was looked at there
    ours.hear(event("finished", "deleted", state="broken"))
    assert {key[1] for key in shown(ours) if key[0] == "attempts_failed"} == {"good", "bad", "kept", "moved", "away"}


def test_a_recipe_whose_folder_cannot_be_looked_into_stays(store: Path) -> None:
    """What is mounted there is away: its folder is empty, or an error."""
    (store / "empty").mkdir()
    for name, folder in (("empty", store / "empty"), ("stale", store / ("x" * 300))):
        write_state(store, RecipeState(name=name, file=str(folder / f"{name}.yaml"), last_attempt=AT))
    assert {key[1] for key in shown(board(store)) if key[0] == "attempts_failed"} == {"good", "bad", "empty", "stale"}


def test_a_recipe_that_a_scheduler_will_look_at_is_there_whatever_its_file_is_called(store: Path) -> None:
    (store / "renamed.yaml").touch()
    write_state(store, RecipeState(name="fresh", file=str(store / "fresh.yaml"), last_attempt=AT))
    ours = board(store)
    ours.plan({"fresh": EPOCH})
    assert ("attempts_failed", "fresh") in shown(ours)


def test_a_scheduler_shows_a_recipe_until_it_is_deleted(store: Path, event: Make) -> None:
    file = store / "fresh.yaml"
    write_state(store, RecipeState(name="fresh", file=str(file), last_attempt=AT))
    file.touch()
    (store / "another.yaml").touch()
    ours = board(store)
    ours.plan({"fresh": EPOCH})
    ours.hear(event("finished", "fresh", state="damaged"))
    assert shown(ours)["release_damaged", "fresh"] == 1
    file.unlink()
    ours.plan({})
    assert not [key for key in shown(ours) if "fresh" in key]


def test_what_a_scheduler_looks_at_no_more_is_not_due_for_ever(store: Path, event: Make) -> None:
    ours = board(store)
    ours.plan({"fresh": EPOCH, "other": EPOCH})
    for name in ("fresh", "other", "asked"):
        ours.hear(event("finished", name, state="current"))
    ours.plan({"other": EPOCH})
    assert {key[1] for key in shown(ours) if key[0] == "due"} == {"other", "asked"}


def test_a_damaged_release_is_shown_until_it_can_be_read(store: Path, event: Make) -> None:
    ours = board(store)
    seen = []
    for state in ("damaged", "unknown", "current"):
        ours.hear(event("finished", "good", state=state, exit_code=5 if state == "damaged" else 0))
        seen.append(shown(ours)["release_damaged", "good"])
    assert seen == [1, 1, 0]


def test_every_metric_is_documented_and_every_alert_uses_what_there_is(store: Path, event: Make) -> None:
    ours = board(store)
    ours.hear(event("queued", "bad"))
    ours.plan({"bad": EPOCH})
    page = (Path(__file__).parents[2] / "docs/notices.md").read_text(encoding="utf-8")
    names = {family.name for family in text_string_to_metric_families(generate_latest(ours.registry).decode())}
    assert {line.split("`")[1].split("{")[0] for line in page.splitlines() if line.startswith("| `quantmint_")} == names
    (group,) = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["groups"]
    for rule in group["rules"]:
        assert {word for word in rule["expr"].replace("{", " ").split() if word.startswith("quantmint_")} <= names


def test_a_damaged_state_hides_no_other(store: Path) -> None:
    told: list[str] = []
    state_path(store, "bad").write_text("{", encoding="utf-8")
    found = shown(board(store, told))
    assert found["last_success_timestamp_seconds", "good"] == EPOCH
    assert len(told) == 1


def test_a_store_that_is_away_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "refresh/any.json").mkdir(parents=True)  # a folder where a file should be: it cannot be read
    ours = board(tmp_path, told)
    assert shown(ours)["queue_length",] == 0
    shown(ours)
    assert len(told) == 1


def test_the_textfile_is_whole_and_the_last_word_is_in_it(store: Path, event: Make) -> None:
    path, told = store / "quantmint.prom", list[str]()
    with outlets(store, warn=told.append, metrics_file=path, environ={}) as out:
        assert samples(path.read_text())["running",] == 0  # there from the start: nobody alarms for its absence
        for number in range(200):
            out.hear(event("queued", f"r{number}", queued=number + 1))
    found = samples(path.read_text())
    assert told == []
    assert found["queue_length",] == 200
    assert len([key for key in found if key[0] == "due"]) == 200
    assert {one.name for one in store.iterdir()} == {"refresh", "quantmint.prom"}  # nothing half written is left


@pytest.mark.parametrize(
    ("path", "said"), [("metrics.txt", "files that end in .prom"), ("none/quantmint.prom", "No such file or directory")]
)
def test_a_textfile_that_nobody_would_read_is_refused(store: Path, path: str, said: str) -> None:
    with pytest.raises(UserError, match=said), outlets(store, warn=print, metrics_file=store / path, environ={}):
        pass


def test_a_disk_that_is_full_is_told_once(store: Path) -> None:
    told: list[str] = []
    folder = store / "metrics"
    folder.mkdir()
    path = folder / "quantmint.prom"
    file = Textfile(path, board(store), warn=told.append, refresh_s=0.01)
    shutil.rmtree(folder)
    again = threading.Event()
    while not told:
        again.wait(0.01)
    file.close()
    assert told == [f"the metrics file {path} cannot be written: No such file or directory"]


def test_prometheus_asks_over_http(store: Path, event: Make) -> None:
    before, told = threading.active_count(), list[str]()
    with outlets(store, warn=told.append, metrics_port=0, environ={}) as out:
        out.hear(event("queued", "bad", queued=1))
        with urllib.request.urlopen(f"http://127.0.0.1:{out.metrics_port}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            found = samples(answer.read().decode())
        taken = outlets(store, warn=told.append, metrics_port=out.metrics_port, environ={})
        with pytest.raises(UserError, match="Address already in use"), taken:
            pass
    assert told == []
    assert found["due", "bad"] == 1
    assert not [key for key in found if key[0].startswith(("python_", "process_"))]  # nothing but what is ours
    assert threading.active_count() <= before


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_promtool_finds_nothing_to_say(store: Path, event: Make) -> None:
    ours = board(store)
    ours.hear(event("queued", "bad"))
    ours.plan({"bad": EPOCH})
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(ours.registry), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
