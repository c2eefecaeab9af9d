"""What only a bucket does: objects in an order, conditions, and what may go wrong on the way to it."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.destination import Publication
from quantmint.pipeline.publish.release import Release
from quantmint.pipeline.store import objects
from tests.publish.conftest import Bucket, MakeRelease
from tests.publish.s3_server import Fault

TOLD = PlainReporter(io.StringIO())
PART = 5 << 20  # bytes; the least that S3 takes
LARGE = b"".join(number.to_bytes(4, "big") * 256 for number in range(11 << 10))  # 11 MiB, no two KiB alike
ROOT = Path(__file__).parents[2]
PUBLISHES = """
import io, pickle, sys
from pathlib import Path
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish.bucket import BucketDestination
url, endpoint, release = sys.argv[1:]
found = pickle.loads(Path(release).read_bytes())
BucketDestination(url, "r", endpoint).publish(found, candidate=False, progress=PlainReporter(io.StringIO()))
"""


def publish(place: BucketDestination, release: Release, *, candidate: bool = False) -> Publication:
    return place.publish(release, candidate=candidate, progress=TOLD)


def current(bucket: Bucket) -> str | None:
    return next((release.title for release in bucket.place().releases() if release.current), None)


def pointer(bucket: Bucket, name: str) -> Any:
    return json.loads(bucket.client("get_object", Key=f"models/r/{name}")["Body"].read())


def names(bucket: Bucket) -> list[str]:
    return [write.removeprefix("PUT models/r/") for write in bucket.server.writes()]


def test_files_come_first_then_the_manifest_then_what_points_to_them(bucket: Bucket, make_release: MakeRelease) -> None:
    release = make_release("one", signed="by me")
    publish(bucket.place(), release)
    assert names(bucket)[-3:] == [f"{release.tag}/quantmint.json", "current.json", f"{release.tag}.json"]
    assert bucket.objects() == sorted(
        [*(f"{release.tag}/{name}" for name in release.files), f"{release.tag}.json", "current.json"]
    )
    assert pointer(bucket, "current.json") == pointer(bucket, f"{release.tag}.json")
    assert pointer(bucket, "current.json") == {
        "schema": 1,
        "tag": release.tag,
        "identity": release.identity,
        "title": release.title,
        "created": "2026-11-21T12:00:00.000Z",
        "size": release.size,
    }
    bucket.server.forget()
    assert publish(bucket.place(), make_release("one")).again
    assert bucket.server.writes() == []


def test_killed_in_the_upload_then_resumed(bucket: Bucket, make_release: MakeRelease, tmp_path: Path) -> None:
    """No object that arrived is sent again, and readers keep what they had."""
    publish(bucket.place(), make_release("old", day=1))
    release = make_release("new", day=2, files={"z.safetensors": b"z" * 1000})
    (tmp_path / "release").write_bytes(pickle.dumps(release))
    server, children = bucket.server, []
    server.forget()

    def kill() -> None:
        os.kill(children[0].pid, signal.SIGKILL)
        raise ConnectionAbortedError

    server.faults = [Fault(r"PUT .*z\.safetensors", first=kill)]
    child = subprocess.Popen(
        [sys.executable, "-c", PUBLISHES, bucket.url, server.url, str(tmp_path / "release")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    children.append(child)
    assert child.wait() == -signal.SIGKILL
    arrived = {write for write in server.writes() if "z.safetensors" not in write}
    assert f"PUT models/r/{release.tag}/model.safetensors" in arrived
    assert current(bucket) == "the model old"

    server.forget()
    lines = io.StringIO()
    found = bucket.place().publish(release, candidate=False, progress=PlainReporter(lines))
    assert (found.current, found.again) == (True, False)
    assert not arrived & set(server.writes())
    assert f"100 % of {release.size:,} B" in lines.getvalue()
    assert "the-secret" not in lines.getvalue()
    assert current(bucket) == "the model new"


def test_a_large_file_goes_in_parts(
    bucket: Bucket, make_release: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART", PART)
    release = make_release("one", files={"model.safetensors": LARGE})
    bucket.server.faults = [Fault(r"partNumber=2\b", status=503, times=2), Fault("POST .*uploadId=", lost=True)]
    faults = bucket.server.faults
    assert publish(bucket.place(), release).current
    assert [fault.times for fault in faults] == [0, 0], "every fault happened"
    assert sum("partNumber" in request.query for request in bucket.server.requests) == 3 + 2
    bucket.server.faults = [Fault("GET .*model.safetensors", lost=True), Fault("GET .*config.json", status=503)]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "model.safetensors.partial").write_bytes(LARGE[: 6 << 20])  # of an attempt that was cut off
    folder = bucket.place().fetch(tmp_path / "copy", tag=None, progress=TOLD)
    assert (folder / "model.safetensors").read_bytes() == LARGE
    with release.files["model.safetensors"].path.open("r+b") as stream:
        stream.write(b"X")
    bucket.client("delete_object", Key=f"models/r/{release.tag}/model.safetensors")
    with pytest.raises(StageError, match="is not what was judged"):
        publish(bucket.place(), release)
    assert f"{release.tag}/model.safetensors" not in bucket.objects()
    assert bucket.client("list_multipart_uploads").get("Uploads", []) == []


def test_fetch_into_the_cache_what_is_wanted(
    bucket: Bucket, make_release: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    publish(bucket.place(), make_release("one"))
    found = bucket.place().fetch(None, tag=None, progress=TOLD, select=lambda name: name.startswith("quantmint"))
    assert found.is_relative_to(tmp_path / "cache" / "quantmint")
    assert sorted(path.name for path in found.rglob("*") if path.is_file()) == ["a.json", "quantmint.json"]
    assert (bucket.place().fetch(None, tag=None, progress=TOLD) / "config.json").is_file()


def test_busy_servers_and_lost_answers(bucket: Bucket, make_release: MakeRelease) -> None:
    bucket.server.faults = [
        Fault("GET ", status=500, code="InternalError", times=2),
        Fault("PUT .*config.json", status=503, times=3),
        Fault("PUT .*a.json", lost=True),
        Fault("PUT .*current.json", lost=True),
    ]
    faults = bucket.server.faults
    assert publish(bucket.place(), make_release("one")).current
    assert [fault.times for fault in faults] == [0] * len(faults), "every fault happened"
    assert current(bucket) == "the model one"


def test_a_server_that_stays_busy(bucket: Bucket, make_release: MakeRelease) -> None:
    bucket.server.faults = [Fault("PUT .*config.json", status=503, times=100)]
    with pytest.raises(StageError, match=r"could not write .*config.json: .*503 Service Unavailable") as refused:
        publish(bucket.place(), make_release("one"))
    assert "Run the same command again" in str(refused.value)
    assert refused.value.transient
    bucket.server.forget()
    assert publish(bucket.place(), make_release("one")).current


@pytest.mark.parametrize("first", ["one", None])
@pytest.mark.parametrize("when", ["PUT .*/quantmint.json", "PUT .*current.json"])
def test_the_second_of_two_publishers_learns_of_the_first(
    bucket: Bucket, make_release: MakeRelease, first: str | None, when: str
) -> None:
    """Long before it would point, or between its last look and the write, where the server's condition decides."""
    if first is not None:
        publish(bucket.place(), make_release(first, day=1))
    mine, theirs = make_release("mine", day=3), make_release("theirs", day=2)
    bucket.server.faults = [Fault(when, first=lambda: publish(bucket.place(), theirs) and None)]
    with pytest.raises(StageError, match=rf"current.json names {theirs.tag} now: somebody else published meanwhile"):
        publish(bucket.place(), mine)
    assert current(bucket) == "the model theirs"
    bucket.server.forget()
    assert publish(bucket.place(), mine).current, "the same command again is a decision"
    assert names(bucket) == ["current.json", f"{mine.tag}.json"]


@pytest.mark.parametrize("name", ["current.json", "candidate.json"])
def test_cut_off_before_its_record_was_written(bucket: Bucket, make_release: MakeRelease, name: str) -> None:
    """Then somebody goes on, and the command that was cut off is repeated."""
    place, candidate = bucket.place(), name == "candidate.json"
    first, second = make_release("one", day=1), make_release("two", day=2)
    publish(place, first)
    publish(place, second, candidate=candidate)
    bucket.client("delete_object", Key=f"models/r/{second.tag}.json")
    assert [release.tag for release in place.releases()] == [second.tag, first.tag]
    if candidate:
        place.promote(None, dry_run=False, progress=TOLD)
    place.rollback(first.tag, dry_run=False, progress=TOLD)
    again = publish(place, make_release("two", day=2))
    assert (again.again, again.current) == (True, False)
    assert f"{second.tag}.json" in bucket.objects()


def test_what_was_promoted_waits_no_more(bucket: Bucket, make_release: MakeRelease) -> None:
    """Killed after `current.json` was written, before `candidate.json` was removed."""
    first, second = make_release("one", day=1), make_release("two", day=2)
    publish(bucket.place(), first)
    publish(bucket.place(), second, candidate=True)
    waits = json.dumps(pointer(bucket, "candidate.json")).encode()
    bucket.place().promote(None, dry_run=False, progress=TOLD)
    bucket.client("put_object", Key="models/r/candidate.json", Body=waits)
    bucket.place().rollback(first.tag, dry_run=False, progress=TOLD)
    assert not any(release.candidate for release in bucket.place().releases())


def test_a_pointer_of_something_else(bucket: Bucket, make_release: MakeRelease) -> None:
    bucket.client("put_object", Key="models/r/current.json", Body=b'{"version": 3}')
    with pytest.raises(StageError, match=r"current.json is no pointer to a release"):
        bucket.place().preflight(make_release("one"))


def test_no_credentials(bucket: Bucket, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="found no credentials") as refused:
        bucket.place().preflight(make_release("one"))
    assert "AWS_ACCESS_KEY_ID" in str(refused.value)
    assert bucket.server.requests == []


def test_credentials_of_a_profile(bucket: Bucket, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    known = "[team]\naws_access_key_id = the-key\naws_secret_access_key = the-secret\n"
    Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).write_text(known)
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert publish(bucket.place(), make_release("one")).current


@pytest.mark.parametrize(
    ("pattern", "status", "code", "message"),
    [
        ("GET ", 403, "InvalidAccessKeyId", "the server refuses the credentials"),
        ("GET ", 403, "AccessDenied", "these credentials may not list"),
        ("PUT ", 403, "AccessDenied", "these credentials may not write"),
        ("DELETE |POST ", 403, "AccessDenied", "these credentials may not remove"),
        ("GET ", 301, "PermanentRedirect", "the bucket is in another region"),
        ("GET ", 403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
    ],
)
def test_what_a_preflight_says(
    bucket: Bucket, make_release: MakeRelease, pattern: str, status: int, code: str, message: str
) -> None:
    bucket.server.faults = [Fault(pattern, status=status, code=code, times=10)]
    with pytest.raises(UserError, match=message) as refused:
        bucket.place().preflight(make_release("one"))
    assert "the-secret" not in str(refused.value)
    assert "the-key" not in str(refused.value)


def test_a_bucket_or_server_that_is_not_there(bucket: Bucket, make_release: MakeRelease) -> None:
    with pytest.raises(UserError, match="there is no such bucket"):
        BucketDestination("s3://nowhere", "r", bucket.server.url).preflight(make_release("one"))
    with pytest.raises(StageError, match="could not list") as away:
        BucketDestination("s3://bucket", "r", "http://127.0.0.1:9").preflight(make_release("one"))
    assert away.value.transient


def test_a_server_of_the_environment(
    bucket: Bucket, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.url)
    assert publish(BucketDestination(bucket.url, "r"), make_release("one")).current
    assert "current.json" in bucket.objects()


@pytest.mark.parametrize(
    ("endpoint", "warned"),
    [("http://minio.internal:9000", True), ("http://127.0.0.1:9000", False), ("https://minio.internal", False)],
)
def test_a_connection_that_others_can_read(endpoint: str, warned: bool) -> None:
    assert objects.Objects("s3://bucket/models", endpoint).insecure == (endpoint if warned else None)
