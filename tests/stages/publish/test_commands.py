"""publish, releases, promote, rollback, prune: what a person types after a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.store.gc import list_runs
from tests.hub.standin import HubStandIn

REPO = "my-org/r"
EARLIER = ["quantize", "inspect", "gate", "report", "package"]


@pytest.fixture
def passed(orchestra: Any, stages: Any, publish_to: Callable[..., None]) -> Callable[..., str]:
    """A run that passed and published to a folder; ``passed(2)`` is one of another checkpoint. Returns the tag."""

    def run(option: int = 1, **section: Any) -> str:
        publish_to(**({"folder": "published", "licence": {"id": "apache-2.0"}} | section))
        outcome = orchestra.run(*stages(option))
        return str(outcome.entry("publish").record.result["tag"])

    return run


def listed(quantmint: Any, place: str) -> dict[str, str]:
    told = quantmint("release", "list", place, "--json").json
    return {
        one["tag"]: "current" if one["current"] else "candidate" if one["candidate"] else "" for one in told["releases"]
    }


def test_what_a_run_left_goes_elsewhere_too(orchestra: Any, passed: Any, quantmint: Any, hub: HubStandIn) -> None:
    tag = passed()
    ended = quantmint("publish", "r.yaml", "--hub", REPO)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [f"checkpoint  {REPO}  {tag}"]
    assert listed(quantmint, REPO) == {tag: "current"}
    assert orchestra.ran == EARLIER, "nothing was measured or quantized again"

    assert quantmint("publish", "r.yaml", "--hub", REPO).out == f"checkpoint  {REPO}  {tag}  was there already\n"
    again = quantmint("publish", "r.yaml", "--hub", REPO, "--json").json
    assert [(one["place"], one["again"]) for one in again["published"]] == [(REPO, True)]
    assert (again["recipe"], again["verdict"], again["dry_run"]) == ("r", "PASS", False)


def test_a_folder_as_a_candidate(passed: Any, quantmint: Any) -> None:
    tag = passed()
    ended = quantmint("publish", "r.yaml", "--folder", "other", "--to", "candidate")
    assert ended.out == f"checkpoint  other/r  {tag}  a candidate: quantmint release promote other/r\n"
    assert listed(quantmint, "other/r") == {tag: "candidate"}
    assert listed(quantmint, "published/r") == {tag: "current"}


def test_every_operation_is_told_before(orchestra: Any, passed: Any, quantmint: Any, hub: HubStandIn) -> None:
    tag = passed()
    asked = ("publish", "r.yaml", "--hub", REPO, "--folder", "published", "--dry-run")
    ended = quantmint(*asked)
    assert ended.code == 0, ended.err
    assert len(list_runs(orchestra.setting.store.root)) == 1, "to look is no run"
    assert ended.out.splitlines()[0].startswith(f"{tag}  r with option 1  ")
    assert "published/r: nothing to do, it is there" in ended.out
    assert re.search(r"upload   model\.safetensors  2\.\d\d MB", ended.out)
    told = quantmint(*asked, "--json").json
    assert (told["tag"], told["dry_run"], told["verdict"]) == (tag, True, "PASS")
    folder, repo = told["places"]
    assert folder["operations"] == []
    assert {"model.safetensors", "config.json"} <= {one["what"] for one in repo["operations"]}
    assert hub.repos == {}
    assert not hub.sent("(POST|PUT|DELETE)", "^/api/(models|repos)")
    assert orchestra.ran == EARLIER


def test_what_would_be_done_is_in_no_public_log(
    orchestra: Any, stages: Any, publish_to: Callable[..., None], quantmint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature without a key cannot be taken back."""
    monkeypatch.setattr("quantmint.pipeline.stages.package.require_signer", lambda _: None)
    publish_to(folder="published", sign={"keyless": True})
    orchestra.run(*(stage for stage in stages() if stage.key not in {"sign", "publish"}))
    orchestra.plan(*stages())
    told = quantmint("publish", "r.yaml", "--dry-run", "--json").json
    assert [one["verb"] for one in told["places"][0]["operations"]][:2] == ["sign", "upload"]
    assert "sign" not in orchestra.ran
    assert not Path("published").exists()


@pytest.mark.usefixtures("project")
def test_only_a_folder_needs_room_here(quantmint: Any, publish_to: Callable[..., None]) -> None:
    publish_to(hub={"repo": REPO})
    assert "published copy" not in quantmint("plan", "r.yaml", "--json").json["disk"]["needed"]
    publish_to(folder="published", hub={"repo": REPO})
    assert "published copy" in quantmint("plan", "r.yaml", "--json").json["disk"]["needed"]


def test_what_would_have_to_run_is_not_run(orchestra: Any, stages: Any, quantmint: Any) -> None:
    orchestra.plan(*stages())
    ended = quantmint("publish", "r.yaml")
    assert ended.code == 2
    assert "no finished run of its current state: quantize, inspect, gate would have to run" in ended.err
    assert "`quantmint run r.yaml` runs them" in ended.err
    assert orchestra.ran == []


@pytest.mark.parametrize(("verdict", "code"), [("FAIL", 1), ("INCONCLUSIVE", 3), ("INVALID", 4)])
def test_only_a_pass(orchestra: Any, stages: Any, quantmint: Any, verdict: str, code: int) -> None:
    orchestra.run(*stages(verdict=verdict, numbers=verdict))
    for more, word in (((), "was"), (("--dry-run",), "would be")):
        ended = quantmint("publish", "r.yaml", *more)
        assert (ended.code, ended.out) == (code, f"nothing {word} published: the verdict is {verdict}\n")
    assert quantmint("publish", "r.yaml", "--json").json["published"] == []
    assert not Path("published").exists()


def test_a_place_that_is_none(orchestra: Any, stages: Any, quantmint: Any) -> None:
    orchestra.run(*stages())
    ended = quantmint("publish", "r.yaml", "--hub", "llama")
    assert (ended.code, ended.err) == (2, "quantmint: --hub: found 'llama', expected org/name\n")


def test_the_list_of_a_folder(passed: Any, quantmint: Any) -> None:
    first, second = passed(1), passed(2)
    ended = quantmint("release", "list", "published/r")
    assert ended.code == 0
    rows = {words[0]: words for words in (line.split() for line in ended.out.splitlines()) if words}
    assert rows.keys() >= {first, second}
    assert "current" in rows[second]
    assert "current" not in rows[first]
    assert " ".join(rows[first]).endswith("r with option 1")
    told = quantmint("release", "list", "published/r", "--json").json
    assert told["place"] == str(Path.cwd() / "published" / "r")
    assert {one["title"] for one in told["releases"]} == {"r with option 1", "r with option 2"}
    assert all(one["size"] > 2_000_000 for one in told["releases"])


def test_back_and_forth(passed: Any, quantmint: Any) -> None:
    first, second = passed(1), passed(2)
    shown = Path("published/r/config.json")
    before = shown.read_text()
    foreseen = quantmint("release", "rollback", "published/r", first, "--dry-run", "--json").json
    assert (foreseen["dry_run"], shown.read_text()) == (True, before)
    ended = quantmint("release", "rollback", "published/r", first)
    assert ended.code == 0
    assert ended.out.splitlines()[-1] == f"current  {first} of published/r"
    assert shown.read_text() != before
    assert listed(quantmint, "published/r") == {first: "current", second: ""}
    again = quantmint("release", "rollback", "published/r", first)
    assert again.out == f"{first} is the current release of published/r already\n"

    mistyped = quantmint("release", "rollback", "published/r", second[:-1])
    assert (mistyped.code, f'did you mean "{second}"' in mistyped.err) == (2, True)
    assert quantmint("release", "rollback", "published/r", second).code == 0
    assert shown.read_text() == before


def test_after_a_rollback_a_run_says_what_readers_get(passed: Any, orchestra: Any, stages: Any, quantmint: Any) -> None:
    first, second = passed(1), passed(2)
    assert quantmint("release", "rollback", "published/r", first).code == 0
    told = quantmint("publish", "r.yaml").out
    assert f"{second}  was there already  readers get {first}: quantmint release rollback published/r {second}" in told


def test_a_prune_that_removes_nothing_says_how_it_counts(passed: Any, quantmint: Any) -> None:
    first, second = passed(1), passed(2)
    assert quantmint("release", "rollback", "published/r", first).code == 0
    told = quantmint("release", "prune", "published/r", "--keep", "1").out
    assert told == (
        f"published/r: nothing to remove; the newest 1 of 2 stay ({second}), {first} stays because readers get it\n"
    )


@pytest.mark.parametrize("command", [("list",), ("promote",), ("rollback",), ("prune", "--keep", "1")])
def test_a_place_where_nothing_is(quantmint: Any, project: Path, command: tuple[str, ...]) -> None:
    more = ["v20261121-01234567"] if command == ("rollback",) else []
    ended = quantmint("release", command[0], "published/none", *more, *command[1:])
    assert ended.code == 2
    assert "published/none" in ended.err
