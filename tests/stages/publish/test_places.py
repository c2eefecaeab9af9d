"""Several places at once: all are asked before the first byte, each is finished by the same command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish.addresses import open_destination
from quantmint.pipeline.stages.publish import published_in
from tests.hub.standin import Fault, HubStandIn

REPO = "my-org/r"


def state(place: str) -> dict[str, str]:
    """What readers of a place get, by tag, the newest first."""
    return {
        found.tag: "current" if found.current else "candidate" if found.candidate else ""
        for found in open_destination(place).releases()
    }


def tag_of(outcome: Any) -> str:
    return str(outcome.entry("publish").record.result["tag"])


def shards(hub: HubStandIn) -> int:
    return len(hub.sent("PUT", "/storage"))


def test_a_folder_and_a_repository_get_the_same_release(
    orchestra: Any, stages: Any, hub: HubStandIn, publish_to: Callable[..., None]
) -> None:
    publish_to(folder="published", hub={"repo": REPO})
    outcome = orchestra.run(*stages())
    folder, repo = published_in(outcome.entry("publish"))
    assert (folder.place, repo.place) == (str(Path.cwd() / "published" / "r"), REPO)
    assert (folder.tag, folder.current) == (repo.tag, repo.current) == (tag_of(outcome), True)
    assert state("published/r") == state(REPO) == {folder.tag: "current"}
    tree = hub.repo(REPO).tree(repo.revision)
    files = {path.relative_to("published/r").as_posix() for path in Path("published/r").rglob("*") if path.is_file()}
    assert tree.keys() - {".gitattributes"} == files


def test_a_run_again_asks_no_network(
    orchestra: Any, stages: Any, hub: HubStandIn, publish_to: Callable[..., None]
) -> None:
    publish_to(hub={"repo": REPO})
    orchestra.run(*stages())
    asked = len(hub.requests)
    assert orchestra.run(*stages()).steps[-1].cached
    assert len(hub.requests) == asked

    sent = shards(hub)
    again = orchestra.run(*stages(), redo=["publish"])
    assert [one.again for one in published_in(again.entry("publish"))] == [True]
    assert shards(hub) == sent


def test_no_place_gets_a_byte_before_all_were_asked(
    orchestra: Any, stages: Any, hub: HubStandIn, publish_to: Callable[..., None]
) -> None:
    publish_to(folder="published", hub={"repo": "read-org/r"})
    with pytest.raises(UserError, match="read-org"):
        orchestra.run(*stages())
    assert not Path("published").exists()
    assert shards(hub) == 0
    assert orchestra.last_run.exit_code == 2


def test_a_place_that_breaks_is_finished_by_the_same_command(
    orchestra: Any, stages: Any, hub: HubStandIn, publish_to: Callable[..., None]
) -> None:
    publish_to(folder="published", hub={"repo": REPO})
    hub.faults.append(Fault("POST", "/commit/", status=403))
    with pytest.raises((UserError, StageError), match=REPO):
        orchestra.run(*stages())
    assert list(state("published/r").values()) == ["current"]
    assert state(REPO) == {}
    sent = shards(hub)
    assert sent > 0

    folder, repo = published_in(orchestra.run(*stages()).entry("publish"))
    assert (folder.again, repo.again, repo.current) == (True, False, True)
    assert shards(hub) == sent


def test_a_candidate_waits_in_every_place(
    orchestra: Any, stages: Any, hub: HubStandIn, publish_to: Callable[..., None], quantmint: Any
) -> None:
    publish_to(folder="published", hub={"repo": REPO})
    first = tag_of(orchestra.run(*stages(1)))
    publish_to(folder="published", hub={"repo": REPO}, to="candidate")
    second = tag_of(orchestra.run(*stages(2)))
    for place in ("published/r", REPO):
        assert state(place) == {first: "current", second: "candidate"}
        assert quantmint("release", "promote", place).code == 0
        assert state(place) == {first: "", second: "current"}
    assert orchestra.run(*stages(2)).steps[-1].cached
    before = list(orchestra.lines)
    orchestra.run(*stages(2), redo=["publish"])
    assert state(REPO) == state("published/r") == {first: "", second: "current"}
    assert not [line for line in orchestra.lines[len(before) :] if "warning" in line]


def test_older_releases_go_after_a_publication(
    orchestra: Any, stages: Any, hub: HubStandIn, publish_to: Callable[..., None], quantmint: Any
) -> None:
    publish_to(folder="published", hub={"repo": REPO}, keep=2)
    tags = [tag_of(orchestra.run(*stages(option))) for option in (1, 2)]
    assert quantmint("release", "rollback", REPO, tags[0]).code == 0
    tags += [tag_of(orchestra.run(*stages(option))) for option in (3, 4)]
    assert state("published/r").keys() == state(REPO).keys()
    assert len(state(REPO)) == 2
    assert state(REPO)[tags[3]] == "current"


def test_what_cannot_be_removed_hides_no_publication(
    orchestra: Any, stages: Any, hub: HubStandIn, publish_to: Callable[..., None]
) -> None:
    publish_to(hub={"repo": REPO}, keep=1)
    first = tag_of(orchestra.run(*stages(1)))
    hub.faults.append(Fault("DELETE", "/tag/", status=403))
    second = tag_of(orchestra.run(*stages(2)))
    assert state(REPO) == {first: "", second: "current"}
    [told] = [line for line in orchestra.lines if "older releases were not removed" in line]
    assert f"`quantmint release prune {REPO} --keep 1` tries again" in told


def test_a_signature_travels_with_the_release(orchestra: Any, stages: Any, publish_to: Callable[..., None]) -> None:
    publish_to(folder="published", sign={"keyless": True})
    outcome = orchestra.run(*stages())
    identity = outcome.entry("publish").record.result["identity"]
    assert Path("published/r/model.sig").read_text() == f"signed {identity}"
