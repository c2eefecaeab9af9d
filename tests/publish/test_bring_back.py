"""A run replaces what a run chose by an earlier release, and never what a person chose: the same in all places."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.progress import PlainReporter
from pipeline.publish.folder import FolderTarget
from pipeline.publish.hub.choice import choice
from pipeline.publish.hub.target import HubTarget
from pipeline.publish.release import Release
from pipeline.publish.storage import StorageTarget
from pipeline.publish.target import Target
from pipeline.recipe.sections import Hub
from tests.hub.standin import Fault, HubStandIn
from tests.publish.conftest import Bucket, MakeRelease, bucket, s3_server

__all__ = ["bucket", "s3_server"]

REPO = "my-org/tiny"
TOLD = PlainReporter(io.StringIO())
X, Y, Z = "v20261121-3f1c0a52", "v20261122-91be07aa", "v20261120-77aa01be"


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


def test_no_run_returns_to_what_a_person_went_back_from(
    target: Target, two: tuple[Release, Release], make_release: MakeRelease
) -> None:
    """A new release makes the choice a run's again; the one that was bad is bad all the same."""
    first, second = two
    target.rollback(first.tag, dry_run=False, progress=TOLD)
    target.publish(make_release("three", day=3), candidate=False, progress=TOLD)
    assert (target.chosen_by_run(), target.left()) == (True, {second.tag})
    assert target.bring_back(second.tag, dry_run=True, progress=TOLD) == ()
    assert target.bring_back(second.tag, dry_run=False, progress=TOLD) == ()
    assert target.bring_back(first.tag, dry_run=False, progress=TOLD)
    target.rollback(second.tag, dry_run=False, progress=TOLD)  # somebody thinks better of it
    assert (shown(target), second.tag in target.left()) == (second.tag, False)


def test_what_somebody_replaced_without_us_stays_gone_too(
    target: Target, two: tuple[Release, Release], make_release: MakeRelease, request: pytest.FixtureRequest
) -> None:
    first, second = two
    match target:
        case FolderTarget():
            link = Path(target.place)
            link.unlink()
            link.symlink_to(Path(".releases", "r", first.tag))
        case HubTarget():
            repo = request.getfixturevalue("hub").repo(REPO)
            repo.refs["refs/heads/main"] = repo.find(first.tag)  # git push --force
        case StorageTarget():
            there = target._objects.read(f"{first.tag}.json")
            assert there is not None
            request.getfixturevalue("bucket").client("put_object", Key="models/r/current.json", Body=there.data)
    assert shown(target) == first.tag
    assert (target.chosen_by_run(), target.left()) == (False, {second.tag})
    assert target.bring_back(second.tag, dry_run=False, progress=TOLD) == ()
    target.publish(make_release("three", day=3), candidate=False, progress=TOLD)
    assert target.chosen_by_run()
    assert target.bring_back(second.tag, dry_run=False, progress=TOLD) == ()


def test_who_names_what_readers_have_has_chosen_it(tmp_path: Path, bucket: Bucket, make_release: MakeRelease) -> None:
    """A run was a minute quicker with the same release. The Hub keeps no commit without a change."""
    first, second = make_release("one", day=1), make_release("two", day=2)
    for target in (FolderTarget(tmp_path / "published", "r"), bucket.target()):
        for release in (first, second):
            target.publish(release, candidate=False, progress=TOLD)
        target.rollback(second.tag, dry_run=True, progress=TOLD)
        assert target.chosen_by_run()
        assert target.rollback(second.tag, dry_run=False, progress=TOLD) == ()
        assert not target.chosen_by_run()


def test_weights_that_somebody_replaced_on_the_hub_are_a_choice(hub: HubStandIn, make_release: MakeRelease) -> None:
    target = HubTarget(REPO, sleep=lambda _: None)
    for release in (make_release("one", day=1), make_release("two", day=2)):
        target.publish(release, candidate=False, progress=TOLD)
    hub.put(REPO, {"README.md": b"Better words."}, "Update README.md")
    assert target.chosen_by_run()
    hub.put(REPO, {"config.json": b"{}"}, "Update config.json")
    assert not target.chosen_by_run()


def test_a_rollback_that_was_cut_off_leaves_nothing_to_finish(
    tmp_path: Path, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the link was set, over a publication that was killed after its link was set."""
    target = FolderTarget(tmp_path / "published", "r")
    first, second = make_release("one", day=1), make_release("two", day=2)
    for release in (first, second):
        target.publish(release, candidate=False, progress=TOLD)
    (tmp_path / "published" / ".releases" / "r" / "pending").symlink_to(second.tag)

    def killed(self: FolderTarget) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FolderTarget, "_settle", killed)
        with pytest.raises(KeyboardInterrupt):
            target.rollback(first.tag, dry_run=False, progress=TOLD)
    assert not target.publish(second, candidate=False, progress=TOLD).current
    assert shown(target) == first.tag


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
    ("titles", "by_run", "left"),
    [
        ([f"{Y}: the model"], True, ""),
        (["Update README.md", f"{Y}: the model", f"Roll back to {X}"], True, ""),
        ([f"Return to {Y}", f"{X}: the model"], True, ""),
        ([f"Promote {Y}", f"{Y}: the model"], False, ""),
        ([f"Roll back to {Y}", f"{Y}: the model"], False, ""),
        ([f"{Y}: the model (#12)"], False, ""),
        ([f'Revert "{X}: the model"', f"{X}: the model", f"{Y}: the model"], False, X),
        ([f"{Y}: a", f'Revert "{X}: the model"', f"{X}: the model"], True, X),
        ([f"{Y}: a", f"Roll back to {Z}", f"{X}: b", f"{Z}: c"], True, X),
        ([f"{Y}: a", f"Promote {X}", f"Roll back to {Z}", f"{X}: b", f"{Z}: c"], True, ""),
        (["Upload 3 files", f"{X}: the model", f"{Y}: the model"], False, X),
        ([f"Return to {X}"], False, X),
        (["initial commit"], False, ""),
        ([], False, ""),
    ],
)
def test_who_chose_by_the_commits_of_main(titles: list[str], by_run: bool, left: str) -> None:
    commits = [(str(number), title) for number, title in enumerate(titles)]
    found = choice(commits, Y, {})
    assert (found.by_run, found.left) == (by_run, {left} - {""})


def test_a_tag_that_main_does_not_know(make_release: MakeRelease) -> None:
    """Taken away by force where it is not older; else it never was there, or nobody knows."""
    commits = [("c", f"{Y}: the model")]
    assert choice(commits, Y, {Y: "c", X: "gone"}).by_run
    assert choice(commits, Y, {Y: "c", X: "gone"}).left == {X}
    assert not choice(commits, Y, {Y: "c", "v20261122-00000000": "gone"}).by_run
    assert choice(commits, Y, {Y: "c", "v20261123-00000000": "waits"}, ["v20261123-00000000"]).by_run
