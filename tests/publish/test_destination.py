"""What every place promises, asked of each: folder, bucket of a real S3 server, shared folder, the Hub's stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.destination import Destination
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.release import MANIFEST, Release
from quantmint.pipeline.store.files import DamagedError
from tests.publish.conftest import MakeRelease
from tests.publish.destinations import KINDS, TOLD, contents, maker, publish, read, states

REPO = "my-org/r"
Three = tuple[Release, Release, Release]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    return maker(request.param, request, tmp_path)("r")


@pytest.fixture
def three(place: Destination, make_release: MakeRelease) -> Three:
    """Two releases, the second of which is current, and a candidate."""
    first, second, third = (make_release(name, day=day) for name, day in (("one", 1), ("two", 2), ("three", 3)))
    assert publish(place, first).current
    assert publish(place, second).current
    assert not publish(place, third, candidate=True).current
    return first, second, third


def test_what_is_published_is_what_readers_get(place: Destination, make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release("one", signed="by me")
    place.preflight(None)
    place.preflight(release)
    planned = place.planned_operations(release, candidate=False)
    assert {one.what for one in planned} >= release.files.keys(), "every file is named"
    found = publish(place, release)
    assert (found.place, found.tag, found.current, found.again) == (place.address, release.tag, True, False)
    assert read(place, tmp_path / "copy") == contents(release)
    (listed,) = place.releases()
    assert (listed.tag, listed.title) == (release.tag, "the model one")
    assert place.planned_operations(release, candidate=False) == ()


def test_a_release_that_is_there_is_left_as_it_is(
    place: Destination, make_release: MakeRelease, tmp_path: Path
) -> None:
    publish(place, make_release("one", signed="by me"))
    again = publish(place, make_release("one", signed="by you"))
    assert (again.again, again.current) == (True, True)
    assert read(place, tmp_path / "copy")["model.sig"] == b"by me"
    assert len(place.releases()) == 1


def test_a_candidate_waits_beside_what_readers_get(place: Destination, three: Three, tmp_path: Path) -> None:
    first, second, third = three
    assert states(place) == {third.tag: "candidate", second.tag: "current", first.tag: ""}
    assert read(place, tmp_path / "copy") == contents(second)
    assert read(place, tmp_path / "third", third.tag) == contents(third)
    assert {one.tag: one.size for one in place.releases()} == {one.tag: one.size for one in three}
    again = publish(place, third, candidate=True)
    assert (again.again, again.current) == (True, False)
    assert states(place)[second.tag] == "current"


def test_promote(place: Destination, three: Three, tmp_path: Path) -> None:
    first, second, third = three
    planned = place.promote(None, dry_run=True, progress=TOLD)
    assert (bool(planned), states(place)[third.tag]) == (True, "candidate")
    assert place.promote(None, dry_run=False, progress=TOLD) == planned
    assert states(place) == {third.tag: "current", second.tag: "", first.tag: ""}
    assert read(place, tmp_path / "copy") == contents(third)
    assert place.promote(third.tag, dry_run=False, progress=TOLD) == ()
    with pytest.raises(UserError, match="has no candidate"):
        place.promote(None, dry_run=False, progress=TOLD)
    with pytest.raises(UserError, match=f"{first.tag} is an earlier release"):
        place.promote(first.tag, dry_run=False, progress=TOLD)


def test_the_first_release_of_all_may_be_a_candidate(place: Destination, make_release: MakeRelease) -> None:
    release = make_release("one")
    assert not publish(place, release, candidate=True).current
    assert states(place) == {release.tag: "candidate"}
    place.promote(None, dry_run=False, progress=TOLD)
    assert states(place) == {release.tag: "current"}


def test_a_rollback_stays_until_somebody_chooses_again(place: Destination, three: Three, tmp_path: Path) -> None:
    first, second, third = three
    planned = place.rollback(first.tag, dry_run=True, progress=TOLD)
    assert states(place)[second.tag] == "current"
    assert place.rollback(first.tag, dry_run=False, progress=TOLD) == planned
    assert read(place, tmp_path / "copy") == contents(first)
    assert place.rollback(first.tag, dry_run=False, progress=TOLD) == ()
    again = publish(place, second)
    assert (again.again, again.current) == (True, False), "a run does not undo it"
    assert place.planned_operations(second, candidate=False) == ()
    assert states(place) == {third.tag: "candidate", second.tag: "", first.tag: "current"}
    place.rollback(second.tag, dry_run=False, progress=TOLD)
    assert read(place, tmp_path / "again") == contents(second)
    for tag, told in (("v20261101-0000000z", "has no release"), (third.tag, "is a candidate that was never a release")):
        with pytest.raises(UserError, match=told):
            place.rollback(tag, dry_run=False, progress=TOLD)


def test_a_new_release_after_a_rollback_is_what_readers_get(
    place: Destination, three: Three, make_release: MakeRelease
) -> None:
    place.rollback(three[0].tag, dry_run=False, progress=TOLD)
    assert publish(place, make_release("four", day=4)).current
    assert list(states(place).values()).count("current") == 1


def test_old_releases_go_and_nothing_else(place: Destination, three: Three) -> None:
    first, second, third = three
    planned = place.prune(keep=1, dry_run=True, progress=TOLD)
    assert ([one.what for one in planned], len(states(place))) == ([first.tag], 3)
    assert place.prune(keep=1, dry_run=False, progress=TOLD) == planned
    assert states(place) == {third.tag: "candidate", second.tag: "current"}


def test_names_do_not_meet(place: Destination, make_release: MakeRelease, tmp_path: Path) -> None:
    if isinstance(place, HubDestination):
        pytest.skip("a repository has one name")
    other = type(place)(place._folder if isinstance(place, FolderDestination) else place._url.rpartition("/")[0], "r.2")  # type: ignore[arg-type, attr-defined]
    if isinstance(place, BucketDestination):
        other._endpoint = place._endpoint  # type: ignore[attr-defined]
    publish(place, make_release("one"))
    publish(other, make_release("two"))
    assert read(place, tmp_path / "copy") == contents(make_release("one"))
    assert len(place.releases()) == len(other.releases()) == 1


def test_bytes_that_changed_after_the_verdict_are_not_shown(
    place: Destination, make_release: MakeRelease, tmp_path: Path
) -> None:
    publish(place, make_release("old", day=1))
    for name in ("config.json", "model.safetensors"):
        release = make_release("new", day=2)
        data = bytearray(release.files[name].path.read_bytes())
        data[100] ^= 1
        release.files[name].path.write_bytes(data)
        with pytest.raises(StageError, match=rf"{name} is not what was judged") as refused:
            publish(place, release)
        assert refused.value.hint
    assert read(place, tmp_path / "copy") == contents(make_release("old", day=1))
    assert publish(place, make_release("new", day=2)).current


def damage(place: Destination, tag: str, name: str, data: bytes, request: pytest.FixtureRequest) -> None:
    """Put other bytes under a release's name, as somebody with the right to write there may."""
    match place:
        case FolderDestination():
            (place._home / tag / name).write_bytes(data)
        case BucketDestination() if place.address.startswith("file://"):
            (Path(place.address.removeprefix("file://")) / tag / name).write_bytes(data)
        case BucketDestination():
            request.getfixturevalue("bucket").client("put_object", Key=f"models/r/{tag}/{name}", Body=data)
        case HubDestination():
            api = place._client().api
            api.create_branch(REPO, branch="by-hand", revision=tag)
            made = api.upload_file(path_or_fileobj=data, path_in_repo=name, repo_id=REPO, revision="by-hand")
            api.delete_tag(REPO, tag=tag)
            api.create_tag(REPO, tag=tag, revision=made.oid)
            api.delete_branch(REPO, branch="by-hand")


def test_no_way_back_to_what_is_damaged(place: Destination, three: Three, request: pytest.FixtureRequest) -> None:
    first, second, _ = three
    damage(place, first.tag, "config.json", b"short", request)
    with pytest.raises(DamagedError, match="is damaged"):
        place.rollback(first.tag, dry_run=False, progress=TOLD)
    damage(place, first.tag, MANIFEST, b"{}", request)
    with pytest.raises(DamagedError, match=rf"{MANIFEST} is not that of {first.tag}"):
        place.rollback(first.tag, dry_run=False, progress=TOLD)
    assert len(place.releases()) == 3, "a list shows what is damaged, too"
    assert states(place)[second.tag] == "current"


def test_a_damaged_release_is_not_fetched_and_is_mended(
    place: Destination, make_release: MakeRelease, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if isinstance(place, HubDestination):
        pytest.skip("a commit does not change")
    release = make_release("one")
    publish(place, release)
    damage(place, release.tag, "config.json", b"x" * release.files["config.json"].size, request)
    with pytest.raises(DamagedError, match=r"config.json is not what the release says"):
        read(place, tmp_path / "copy")
    assert not (tmp_path / "copy" / MANIFEST).exists(), "it comes last"
    assert not publish(place, make_release("one")).again
    damage(place, release.tag, "more.safetensors", b"x", request)
    with pytest.raises(DamagedError, match=r"more.safetensors is no file of the release"):
        read(place, tmp_path / "more")
    publish(place, make_release("one"))
    assert read(place, tmp_path / "whole") == contents(release)


def test_names_that_lead_out_of_the_folder_are_refused(
    place: Destination, make_release: MakeRelease, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A manifest from elsewhere, whose digest is right: who wrote it wrote the tag as well."""
    if isinstance(place, HubDestination):
        pytest.skip("git takes no such name")
    release = make_release("one")
    publish(place, release)
    data = json.loads(release.files[MANIFEST].path.read_bytes())
    data["files"]["../../escaped"] = {"size": 1, "sha256": "a" * 64}
    raw = json.dumps(data).encode()
    damage(place, release.tag, MANIFEST, raw, request)
    with pytest.raises((UserError, DamagedError)):
        place.fetch(tmp_path / "a" / "b", tag=None, progress=TOLD)
    assert not (tmp_path / "escaped").exists()


def test_nothing_is_there(place: Destination) -> None:
    if isinstance(place, HubDestination):
        with pytest.raises(UserError, match="there is no such repository, or this token may not see it"):
            place.releases()
        return
    assert place.releases() == ()
    with pytest.raises(UserError, match="nothing is published there"):
        place.fetch(None, tag=None, progress=TOLD)
