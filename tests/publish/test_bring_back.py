"""A run replaces what a run chose by an earlier release, and never what a person chose: the same in all places."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.progress import PlainReporter
from pipeline.publish.folder import FolderTarget
from pipeline.publish.hub.choice import chosen_by_run
from pipeline.publish.hub.target import HubTarget
from pipeline.publish.release import Release
from pipeline.publish.target import Target
from pipeline.recipe.publishing import Hub
from tests.hub.standin import Fault, HubStandIn
from tests.publish.conftest import Bucket, MakeRelease, bucket, s3_server

__all__ = ["bucket", "s3_server"]

REPO = "my-org/tiny"
TOLD = PlainReporter(io.StringIO())
X, Y = "v20261121-3f1c0a52", "v20261122-91be07aa"


@pytest.fixture(params=["folder", "hub", "storage"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    match request.param:
        case "folder":
            return FolderTarget(tmp_path / "published", "r")
        case "hub":
            request.getfixturevalue("hub")
            return HubTarget(REPO, sleep=lambda _: None)
        case _:
            found: Bucket = request.getfixturevalue("bucket")
            return found.target()


@pytest.fixture
def two(target: Target, make_release: MakeRelease) -> tuple[Release, Release]:
    """Published one after the other, each by a run."""
    releases = make_release("one", day=1), make_release("two", day=2)
    for release in releases:
        assert target.publish(release, candidate=False, progress=TOLD).current
    assert target.chosen_by_run()
    return releases


def shown(target: Target) -> str:
    (tag,) = (one.tag for one in target.releases() if one.current)
    return tag


def test_there_and_back_and_there_again(target: Target, two: tuple[Release, Release]) -> None:
    first, second = two
    planned = target.bring_back(first.tag, dry_run=True, progress=TOLD)
    assert shown(target) == second.tag
    assert planned
    assert target.bring_back(first.tag, dry_run=False, progress=TOLD) == planned
    assert shown(target) == first.tag
    assert target.bring_back(first.tag, dry_run=False, progress=TOLD) == ()
    assert target.chosen_by_run()
    assert target.bring_back(second.tag, dry_run=False, progress=TOLD)
    assert shown(target) == second.tag


def test_a_persons_choice_stays(target: Target, two: tuple[Release, Release], make_release: MakeRelease) -> None:
    first, second = two
    target.rollback(first.tag, dry_run=False, progress=TOLD)
    assert not target.chosen_by_run()
    assert target.bring_back(second.tag, dry_run=False, progress=TOLD) == ()
    assert not target.publish(second, candidate=False, progress=TOLD).current
    target.rollback(second.tag, dry_run=False, progress=TOLD)  # to what a run had chosen, but now a person did
    assert target.bring_back(first.tag, dry_run=False, progress=TOLD) == ()
    assert shown(target) == second.tag
    third = make_release("three", day=3)
    target.publish(third, candidate=True, progress=TOLD)
    target.promote(None, dry_run=False, progress=TOLD)
    assert target.bring_back(first.tag, dry_run=False, progress=TOLD) == ()
    assert shown(target) == third.tag
    assert target.publish(make_release("four", day=4), candidate=False, progress=TOLD).current  # a new one is a run's
    assert target.chosen_by_run()


def test_a_candidate_is_for_a_person_to_promote(
    target: Target, two: tuple[Release, Release], make_release: MakeRelease
) -> None:
    third = make_release("three", day=3)
    target.publish(third, candidate=True, progress=TOLD)
    assert target.chosen_by_run()
    assert target.bring_back(third.tag, dry_run=False, progress=TOLD) == ()
    assert target.bring_back("v20261130-00000000", dry_run=False, progress=TOLD) == ()
    assert shown(target) == two[1].tag


def test_where_nobody_noted_who_chose_it_stays(tmp_path: Path, bucket: Bucket, make_release: MakeRelease) -> None:
    """As places are that an earlier version of quantmint published to."""
    first, second = make_release("one", day=1), make_release("two", day=2)
    for target in (FolderTarget(tmp_path / "published", "r"), bucket.target()):
        for release in (first, second):
            target.publish(release, candidate=False, progress=TOLD)
        if isinstance(target, FolderTarget):
            (tmp_path / "published" / ".releases" / "r" / "chosen").unlink()
        else:
            bucket.client("delete_object", Key="models/r/chosen.json")
        assert not target.chosen_by_run()
        assert target.bring_back(first.tag, dry_run=False, progress=TOLD) == ()
        assert shown(target) == second.tag


@pytest.mark.parametrize("cut", ["link", "note"])
def test_a_folder_that_was_cut_off_is_finished_by_the_same_publication(
    tmp_path: Path, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    target = FolderTarget(tmp_path / "published", "r")
    first, second = make_release("one", day=1), make_release("two", day=2)
    for release in (first, second):
        target.publish(release, candidate=False, progress=TOLD)
    point, names = FolderTarget._point, {"link": "r", "note": "chosen"}

    def killed(self: FolderTarget, link: Path, to: Path) -> None:
        if link.name == names[cut]:
            raise KeyboardInterrupt
        point(self, link, to)

    monkeypatch.setattr(FolderTarget, "_point", killed)
    with pytest.raises(KeyboardInterrupt):
        target.bring_back(first.tag, dry_run=False, progress=TOLD)
    monkeypatch.setattr(FolderTarget, "_point", point)
    assert target.publish(first, candidate=False, progress=TOLD).current
    assert target.chosen_by_run()


def test_a_commit_that_was_refused_is_made_by_the_same_command(hub: HubStandIn, make_release: MakeRelease) -> None:
    target = HubTarget(REPO, sleep=lambda _: None)
    first, second = make_release("one", day=1), make_release("two", day=2)
    for release in (first, second):
        target.publish(release, candidate=False, progress=TOLD)
    hub.faults.append(Fault("POST", "/commit/", status=403))
    with pytest.raises(UserError, match="403"):
        target.bring_back(first.tag, dry_run=False, progress=TOLD)
    assert shown(target) == second.tag
    assert target.bring_back(first.tag, dry_run=False, progress=TOLD)
    assert (shown(target), target.chosen_by_run()) == (first.tag, True)


def test_what_goes_by_pull_requests_is_left_to_people(hub: HubStandIn, make_release: MakeRelease) -> None:
    section = Hub.model_validate({"repo": REPO, "via": "pull-request"})
    target = HubTarget(REPO, section, sleep=lambda _: None)
    first, second = make_release("one", day=1), make_release("two", day=2)
    for release in (first, second):
        target.publish(release, candidate=False, progress=TOLD)
    assert target.bring_back(first.tag, dry_run=False, progress=TOLD) == ()
    assert not HubTarget(REPO).chosen_by_run()  # who merged it is not known


@pytest.mark.parametrize(
    ("titles", "by_run"),
    [
        ([f"{Y}: the model"], True),
        (["Update README.md", f"{Y}: the model", f"Roll back to {X}"], True),
        ([f"Return to {Y}", f"{X}: the model"], True),
        ([f"Promote {Y}", f"{Y}: the model"], False),
        ([f"Roll back to {Y}", f"{Y}: the model"], False),
        ([f"{Y}: the model (#12)"], False),
        ([f'Revert "{X}: the model"', f"{X}: the model", f"{Y}: the model"], False),
        ([f"Return to {X}"], False),
        (["initial commit"], False),
        ([], False),
    ],
)
def test_who_chose_by_the_commits_of_main(titles: list[str], by_run: bool) -> None:
    assert chosen_by_run(titles, Y) == by_run
