"""A bucket of a real server: which release readers get, and how that changes."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError, UserError
from pipeline.progress import PlainReporter
from pipeline.publish.fetching import OtherBytesError
from pipeline.publish.release import MANIFEST, Release
from pipeline.publish.storage import StorageTarget, multipart
from pipeline.publish.storage.s3 import S3Objects
from pipeline.publish.target import Operation, Published

MakeRelease = Callable[..., Release]
TOLD = PlainReporter(io.StringIO())


@pytest.fixture
def three(bucket: Any, make_release: MakeRelease) -> tuple[Release, Release, Release]:
    """Two releases, the second of which is current, and a candidate."""
    first, second, third = (make_release(name, day=day) for name, day in (("one", 1), ("two", 2), ("three", 3)))
    target = bucket.target()
    target.publish(first, candidate=False, progress=TOLD)
    target.publish(second, candidate=False, progress=TOLD)
    target.publish(third, candidate=True, progress=TOLD)
    bucket.server.forget()
    return first, second, third


def states(target: StorageTarget) -> list[tuple[str, bool, bool]]:
    return [(release.title, release.current, release.candidate) for release in target.releases()]


def pointer(bucket: Any, name: str) -> Any:
    with_body = bucket.target()._objects.read(name)
    return None if with_body is None else json.loads(with_body.data)


def test_what_is_published(bucket: Any, make_release: MakeRelease) -> None:
    release = make_release("one", signed="by me")
    lines = io.StringIO()
    target = bucket.target()
    target.preflight(release)
    assert bucket.objects() == [], "a preflight leaves nothing"
    assert bucket.client("list_multipart_uploads").get("Uploads", []) == []
    found = target.publish(release, candidate=False, progress=PlainReporter(lines))
    assert found == Published(f"{bucket.url}/r", release.tag, release.identity, current=True, again=False)
    assert bucket.objects() == sorted(
        [*(f"{release.tag}/{name}" for name in release.files), f"{release.tag}.json", "current.json", "chosen.json"]
    )
    assert pointer(bucket, "current.json") == {
        "schema": 1,
        "tag": release.tag,
        "identity": release.identity,
        "title": release.title,
        "created": "2026-11-21T12:00:00.000Z",
        "size": release.size,
    }
    assert f"100 % of {release.size:,} B" in lines.getvalue()
    assert "the-secret" not in lines.getvalue()


def test_files_come_first_then_the_manifest_then_what_points_to_them(bucket: Any, make_release: MakeRelease) -> None:
    release = make_release("one")
    bucket.target().publish(release, candidate=False, progress=TOLD)
    assert [write.removeprefix("PUT models/r/") for write in bucket.server.writes()][-4:] == [
        f"{release.tag}/quantmint.json",
        "current.json",
        "chosen.json",
        f"{release.tag}.json",
    ]


def test_the_same_release_again_writes_nothing(bucket: Any, make_release: MakeRelease) -> None:
    bucket.target().publish(make_release("one"), candidate=False, progress=TOLD)
    bucket.server.forget()
    again = bucket.target().publish(make_release("one"), candidate=False, progress=TOLD)
    assert (again.again, again.current) == (True, True)
    assert bucket.server.writes() == []


def test_the_same_release_with_another_signature_stays_as_it_was(bucket: Any, make_release: MakeRelease) -> None:
    bucket.target().publish(make_release("one", signed="by me"), candidate=False, progress=TOLD)
    bucket.server.forget()
    lines = io.StringIO()
    release = make_release("one", signed="by you, later")
    assert bucket.target().publish(release, candidate=False, progress=PlainReporter(lines)).again
    assert bucket.server.writes() == []
    assert "another signature" in lines.getvalue()


def test_an_object_that_was_edited_is_sent_again(bucket: Any, make_release: MakeRelease) -> None:
    release = make_release("one")
    bucket.target().publish(release, candidate=False, progress=TOLD)
    size = release.files["config.json"].size
    for name in ("config.json", "stray.py"):
        bucket.client("put_object", Key=f"models/r/{release.tag}/{name}", Body=b"x" * size)
    bucket.server.forget()
    lines = io.StringIO()
    assert not bucket.target().publish(make_release("one"), candidate=False, progress=PlainReporter(lines)).again
    assert [write for write in bucket.server.writes() if "uploads" not in write] == [
        f"PUT models/r/{release.tag}/config.json",
        f"DELETE models/r/{release.tag}/stray.py",
    ]
    assert "stray.py is no file of the release" in lines.getvalue()


def test_what_would_be_done(bucket: Any, make_release: MakeRelease) -> None:
    release = make_release("one")
    planned = bucket.target().operations(release, candidate=False)
    assert {operation for operation in planned if operation.verb == "upload"} == {
        Operation("upload", name, file.size) for name, file in release.files.items()
    }
    assert planned[-1] == Operation("point", f"{bucket.url}/r/current.json to {release.tag}")
    assert bucket.server.writes() == []
    assert bucket.target().operations(release, candidate=True)[-1].what.endswith(f"candidate.json to {release.tag}")
    bucket.target().publish(release, candidate=False, progress=TOLD)
    assert bucket.target().operations(release, candidate=False) == ()


def test_promote(bucket: Any, three: tuple[Release, Release, Release]) -> None:
    target = bucket.target()
    assert states(target) == [
        ("the model three", False, True),
        ("the model two", True, False),
        ("the model one", False, False),
    ]
    planned = target.promote(None, dry_run=True, progress=TOLD)
    assert ([operation.verb for operation in planned], bucket.server.writes()) == (["point", "remove"], [])
    assert target.promote(None, dry_run=False, progress=TOLD) == planned
    assert states(target)[:2] == [("the model three", True, False), ("the model two", False, False)]
    assert pointer(bucket, "candidate.json") is None
    assert bucket.server.writes() == [
        "DELETE models/r/chosen.json",
        "PUT models/r/current.json",
        "DELETE models/r/candidate.json",
    ]
    assert target.promote(three[2].tag, dry_run=False, progress=TOLD) == ()
    with pytest.raises(UserError, match="has no candidate"):
        target.promote(None, dry_run=False, progress=TOLD)


def test_rollback_stays_when_the_same_release_is_published_again(
    bucket: Any, three: tuple[Release, Release, Release]
) -> None:
    first, second, _ = three
    target = bucket.target()
    target.rollback(first.tag, dry_run=False, progress=TOLD)
    assert pointer(bucket, "current.json")["tag"] == first.tag
    again = target.publish(second, candidate=False, progress=TOLD)
    assert (again.again, again.current) == (True, False)
    assert bucket.server.writes() == [
        f"PUT models/r/left.{second.tag}.json",
        "DELETE models/r/chosen.json",
        "PUT models/r/current.json",
    ]
    with pytest.raises(UserError, match="has no release"):
        target.rollback("../r", dry_run=False, progress=TOLD)


def test_no_way_back_to_what_is_damaged(bucket: Any, three: tuple[Release, Release, Release], tmp_path: Path) -> None:
    first, target = three[0], bucket.target()
    bucket.client("put_object", Key=f"models/r/{first.tag}/config.json", Body=b"short")
    with pytest.raises(StageError, match=r"is damaged: config.json: found 5 bytes"):
        target.rollback(first.tag, dry_run=False, progress=TOLD)
    bucket.client("put_object", Key=f"models/r/{first.tag}/config.json", Body=b"x" * first.files["config.json"].size)
    with pytest.raises(StageError, match=r"config.json is not what the release says"):
        target.fetch(tmp_path / "copy", tag=first.tag, progress=TOLD)
    assert not (tmp_path / "copy" / "quantmint.json").exists()
    bucket.client("put_object", Key=f"models/r/{first.tag}/quantmint.json", Body=b"{}")
    for attempt in (
        lambda: target.rollback(first.tag, dry_run=False, progress=TOLD),
        lambda: target.fetch(tmp_path / "copy", tag=first.tag, progress=TOLD),
    ):
        with pytest.raises(StageError, match=r"its quantmint.json is not the one that was published"):
            attempt()
    assert pointer(bucket, "current.json")["tag"] == three[1].tag


def test_remove(bucket: Any, three: tuple[Release, Release, Release]) -> None:
    first, second, third = three
    target = bucket.target()
    for kept, state in ((second, "the current release"), (third, "a candidate")):
        with pytest.raises(UserError, match=f"{kept.tag} is {state}"):
            target.remove([first.tag, kept.tag], dry_run=False, progress=TOLD)
    assert target.remove([first.tag], dry_run=True, progress=TOLD) == (Operation("remove", first.tag, first.size),)
    assert bucket.server.writes() == []
    target.remove([first.tag], dry_run=False, progress=TOLD)
    assert [release.tag for release in target.releases()] == [third.tag, second.tag]
    assert not any(key.startswith(first.tag) for key in bucket.objects())


def test_fetch(
    bucket: Any, three: tuple[Release, Release, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "PART", 100)
    target, second = bucket.target(), three[1]
    into = tmp_path / "copy"
    into.mkdir()
    weights = second.files["model.safetensors"].path.read_bytes()
    (into / "model.safetensors.partial").write_bytes(weights[:150])  # from an attempt that was cut off
    assert target.fetch(into, tag=None, progress=TOLD) == into
    assert {path.relative_to(into).as_posix(): path.read_bytes() for path in into.rglob("*") if path.is_file()} == {
        name: file.path.read_bytes() for name, file in second.files.items()
    }
    assert sum("model.safetensors" in request.path for request in bucket.server.requests) == len(weights) // 100 - 1
    bucket.server.forget()
    target.fetch(into, tag=None, progress=TOLD)
    assert not any("model.safetensors" in request.path for request in bucket.server.requests)


def test_fetch_into_the_cache_what_is_wanted(
    bucket: Any, three: tuple[Release, Release, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = bucket.target().fetch(
        None, tag=three[0].tag, progress=TOLD, wanted=lambda name: name.startswith("quantmint")
    )
    assert found.is_relative_to(tmp_path / "cache" / "quantmint")
    assert sorted(path.name for path in found.rglob("*") if path.is_file()) == ["a.json", "quantmint.json"]
    assert (bucket.target().fetch(None, tag=three[0].tag, progress=TOLD) / "config.json").is_file()


def test_names_that_lead_out_of_the_folder_are_refused(bucket: Any, make_release: MakeRelease, tmp_path: Path) -> None:
    """A manifest from elsewhere; its digest is right, for who wrote it wrote the record as well."""
    release = make_release("one")
    manifest = release.files["quantmint.json"].path
    data = json.loads(manifest.read_bytes())
    data["files"]["../../escaped"] = {"size": 1, "sha256": "a" * 64}
    manifest.write_text(json.dumps(data))
    raw = manifest.read_bytes()
    identity = hashlib.sha256(raw).hexdigest()
    files = {
        **release.files,
        "quantmint.json": replace(release.files["quantmint.json"], size=len(raw), sha256=identity),
    }
    forged = Release("r", f"v20261121-{identity[:8]}", identity, "forged", files)
    bucket.target().publish(forged, candidate=False, progress=TOLD)
    with pytest.raises(UserError, match="expected a relative path"):
        bucket.target().fetch(tmp_path / "a" / "b", tag=None, progress=TOLD)
    assert not (tmp_path / "escaped").exists()


def test_a_pointer_of_something_else(bucket: Any, make_release: MakeRelease) -> None:
    bucket.client("put_object", Key="models/r/current.json", Body=b'{"version": 3}')
    with pytest.raises(StageError, match=r"current.json is no pointer to a release"):
        bucket.target().preflight(make_release("one"))


def test_names_do_not_meet(bucket: Any, make_release: MakeRelease) -> None:
    bucket.target("r").publish(make_release("one"), candidate=False, progress=TOLD)
    bucket.target("r.2").publish(make_release("two"), candidate=False, progress=TOLD)
    assert states(bucket.target("r")) == [("the model one", True, False)]
    assert states(bucket.target("r.2")) == [("the model two", True, False)]
    assert bucket.target("nothing").releases() == ()


def test_a_release_that_readers_have_is_one_though_its_record_was_never_written(
    bucket: Any, make_release: MakeRelease
) -> None:
    """Killed between the last two writes; then somebody goes back, and the command that was cut off is repeated."""
    target = bucket.target()
    first, second = make_release("one", day=1), make_release("two", day=2)
    target.publish(first, candidate=False, progress=TOLD)
    target.publish(second, candidate=False, progress=TOLD)
    bucket.client("delete_object", Key=f"models/r/{second.tag}.json")
    assert [(release.tag, release.current) for release in target.releases()] == [(second.tag, True), (first.tag, False)]
    target.rollback(first.tag, dry_run=False, progress=TOLD)
    again = target.publish(make_release("two", day=2), candidate=False, progress=TOLD)
    assert (again.again, again.current) == (True, False)
    assert [release.tag for release in target.releases() if release.current] == [first.tag]


def test_a_candidate_whose_record_was_never_written_is_promoted(bucket: Any, make_release: MakeRelease) -> None:
    target, release = bucket.target(), make_release("one")
    target.publish(release, candidate=True, progress=TOLD)
    bucket.client("delete_object", Key=f"models/r/{release.tag}.json")
    assert target.promote(None, dry_run=False, progress=TOLD)
    assert [(found.tag, found.current) for found in target.releases()] == [(release.tag, True)]
    assert f"{release.tag}.json" in bucket.objects()


def test_what_was_promoted_waits_no_more(bucket: Any, three: tuple[Release, Release, Release]) -> None:
    """Killed after `current.json` was written, before `candidate.json` was removed."""
    target = bucket.target()
    waits = json.dumps(pointer(bucket, "candidate.json")).encode()
    target.promote(None, dry_run=False, progress=TOLD)
    bucket.client("put_object", Key="models/r/candidate.json", Body=waits)
    target.rollback(three[0].tag, dry_run=False, progress=TOLD)
    assert not any(release.candidate for release in target.releases())


def test_weights_that_lie_beside_a_release_are_not_passed_over(
    bucket: Any, make_release: MakeRelease, tmp_path: Path
) -> None:
    release = make_release("one")
    bucket.target().publish(release, candidate=False, progress=TOLD)
    bucket.client("put_object", Key=f"models/r/{release.tag}/model-2.safetensors", Body=b"x")
    with pytest.raises(OtherBytesError, match=r"model-2.safetensors is no file of the release"):
        bucket.target().fetch(tmp_path / "copy", tag=None, progress=TOLD)
    wanted = bucket.target().fetch(tmp_path / "some", tag=None, progress=TOLD, wanted=lambda name: name == MANIFEST)
    assert (wanted / MANIFEST).exists()


def test_a_release_that_becomes_current_while_others_are_removed_stays(
    bucket: Any, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = [make_release(name, day=day) for name, day in (("one", 1), ("two", 2), ("three", 3))]
    for release in releases:
        bucket.target().publish(release, candidate=False, progress=TOLD)
    target, clear = bucket.target(), S3Objects.clear

    def meanwhile(objects: S3Objects, folder: str) -> None:
        clear(objects, folder)
        bucket.target().rollback(releases[1].tag, dry_run=False, progress=TOLD)

    monkeypatch.setattr(S3Objects, "clear", meanwhile)
    with pytest.raises(UserError, match="is the current release"):
        target.remove([releases[0].tag, releases[1].tag], dry_run=False, progress=TOLD)
    assert f"{releases[1].tag}/config.json" in bucket.objects()
