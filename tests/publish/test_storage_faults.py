"""What may go wrong on the way to a bucket: nothing is lost, nothing is overwritten, and what was sent is kept."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StageError, UserError
from pipeline.progress import PlainReporter
from pipeline.publish.release import Release
from pipeline.publish.storage import StorageTarget, multipart
from tests.publish.s3_server import Fault

MakeRelease = Callable[..., Release]
TOLD = PlainReporter(io.StringIO())
PART = 5 << 20  # bytes; the least that S3 takes
LARGE = b"".join(number.to_bytes(4, "big") * 256 for number in range(11 << 10))  # 11 MiB, no two KiB alike
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART", PART)


def current(bucket: Any) -> str | None:
    return next((release.title for release in bucket.target().releases() if release.current), None)


def test_killed_in_the_upload_then_resumed(bucket: Any, make_release: MakeRelease, tmp_path: Path) -> None:
    """No object and no part that arrived is sent again."""
    bucket.target().publish(make_release("old", day=1), candidate=False, progress=TOLD)
    release = make_release("new", day=2, files={"model.safetensors": LARGE})
    (tmp_path / "release").write_bytes(pickle.dumps(release))
    server, children = bucket.server, []
    server.forget()

    def kill() -> None:
        server.wait_for(2, r"PUT .*model\.safetensors\?.*partNumber=[12]\b")
        os.kill(children[0].pid, signal.SIGKILL)
        raise ConnectionAbortedError

    server.faults = [Fault(r"partNumber=3\b", first=kill)]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.publish.killed_upload", bucket.url, server.url, str(PART), tmp_path / "release"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    children.append(child)
    assert child.wait() == -signal.SIGKILL
    arrived = {write for write in server.writes() if "model.safetensors" not in write}
    assert arrived == {f"PUT models/r/{release.tag}/config.json"}
    assert current(bucket) == "the model old"

    server.forget()
    lines = io.StringIO()
    found = bucket.target().publish(release, candidate=False, progress=PlainReporter(lines))
    assert (found.current, found.again) == (True, False)
    assert not arrived & set(server.writes())
    parts = [request.query for request in server.requests if "partNumber" in request.query]
    assert ["partNumber=3" in query for query in parts] == [True]
    assert f"100 % of {release.size:,} B" in lines.getvalue()
    assert bucket.client("get_object", Key=f"models/r/{release.tag}/model.safetensors")["ContentLength"] == len(LARGE)
    assert bucket.client("list_multipart_uploads").get("Uploads", []) == []
    assert current(bucket) == "the model new"
    server.forget()
    assert bucket.target().publish(release, candidate=False, progress=TOLD).again
    assert server.writes() == []


def test_busy_servers_and_lost_connections(bucket: Any, make_release: MakeRelease, tmp_path: Path) -> None:
    release = make_release("one", files={"model.safetensors": LARGE})
    bucket.server.faults = [
        Fault("GET ", status=500, code="InternalError", times=2),
        Fault("PUT .*config.json", status=503, times=3),
        Fault("PUT .*a.json", lost=True),
        Fault(r"partNumber=2\b", status=503, times=2),
        Fault("POST .*uploadId=", lost=True),
        Fault("PUT .*current.json", lost=True),
    ]
    faults = bucket.server.faults
    assert bucket.target().publish(release, candidate=False, progress=TOLD).current
    assert [fault.times for fault in faults] == [0] * len(faults), "every fault happened"
    bucket.server.faults = [Fault("GET .*model.safetensors", lost=True), Fault("GET .*config.json", status=503)]
    folder = bucket.target().fetch(tmp_path / "copy", tag=None, progress=TOLD)
    assert (folder / "model.safetensors").read_bytes() == LARGE


def test_a_server_that_stays_busy(bucket: Any, make_release: MakeRelease) -> None:
    bucket.server.faults = [Fault("PUT .*config.json", status=503, times=100)]
    with pytest.raises(StageError, match=r"could not write .*config.json: the server answered 503 SlowDown") as refused:
        bucket.target().publish(make_release("one"), candidate=False, progress=TOLD)
    assert "Run the same command again" in str(refused.value)
    assert sum("config.json" in write for write in bucket.server.writes()) == 6
    bucket.server.forget()
    assert bucket.target().publish(make_release("one"), candidate=False, progress=TOLD).current


def test_two_publishers(bucket: Any, make_release: MakeRelease) -> None:
    """The second to finish learns of the first; the same command again is a decision."""
    mine, theirs = make_release("mine", day=1), make_release("theirs", day=2)

    def publish_theirs() -> None:
        bucket.target().publish(theirs, candidate=False, progress=TOLD)

    bucket.server.faults = [Fault(f"PUT .*{mine.tag}/quantmint.json", first=publish_theirs)]
    with pytest.raises(StageError, match=rf"current.json named nothing when .* names {theirs.tag} now: somebody else"):
        bucket.target().publish(mine, candidate=False, progress=TOLD)
    assert current(bucket) == "the model theirs"
    bucket.server.forget()
    assert bucket.target().publish(mine, candidate=False, progress=TOLD).current
    assert bucket.server.writes() == [f"PUT models/r/{name}.json" for name in ("current", "chosen", mine.tag)]


@pytest.mark.parametrize("first", ["one", None])
def test_a_pointer_that_moves_between_the_look_and_the_put(
    bucket: Any, make_release: MakeRelease, first: str | None
) -> None:
    """The server's condition decides."""
    if first is not None:
        bucket.target().publish(make_release(first, day=1), candidate=False, progress=TOLD)
    theirs = make_release("theirs", day=2)

    def publish_theirs() -> None:
        bucket.target().publish(theirs, candidate=False, progress=TOLD)

    bucket.server.faults = [Fault("PUT .*current.json", first=publish_theirs)]
    with pytest.raises(StageError, match=r"somebody else published. Nothing was overwritten"):
        bucket.target().publish(make_release("mine", day=3), candidate=False, progress=TOLD)
    assert current(bucket) == "the model theirs"


def test_a_server_that_knows_no_conditions(bucket: Any, make_release: MakeRelease) -> None:
    bucket.server.faults = [Fault("PUT .*current.json", status=501, code="NotImplemented")]
    assert bucket.target().publish(make_release("one"), candidate=False, progress=TOLD).current
    assert current(bucket) == "the model one"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_bytes_that_changed_after_the_verdict(bucket: Any, make_release: MakeRelease, name: str) -> None:
    """One file goes in one piece, the other in parts."""
    bucket.target().publish(make_release("old", day=1), candidate=False, progress=TOLD)
    release = make_release("new", day=2, files={"model.safetensors": LARGE})
    with release.files[name].path.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"X")
    with pytest.raises(StageError, match=rf"{name} is not what was judged"):
        bucket.target().publish(release, candidate=False, progress=TOLD)
    assert f"{release.tag}/{name}" not in bucket.objects()
    assert bucket.client("list_multipart_uploads").get("Uploads", []) == []
    assert current(bucket) == "the model old"


def test_bytes_that_the_server_has_otherwise(bucket: Any, make_release: MakeRelease) -> None:
    """What it says it holds is compared with what was sent."""
    release = make_release("one")
    key = f"models/r/{release.tag}/config.json"

    def overwrite() -> None:
        bucket.client("put_object", Key=key, Body=b"x" * release.files["config.json"].size)

    bucket.server.faults = [Fault("HEAD .*config.json", first=overwrite)]
    with pytest.raises(StageError, match=r"config.json is not on the server what was sent"):
        bucket.target().publish(release, candidate=False, progress=TOLD)
    assert key not in bucket.objects()


def test_no_credentials(bucket: Any, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="found no credentials") as refused:
        bucket.target().preflight(make_release("one"))
    assert "AWS_ACCESS_KEY_ID" in str(refused.value)
    assert bucket.server.requests == []


@pytest.mark.parametrize(
    ("pattern", "status", "code", "message"),
    [
        ("HEAD ", 403, "", "these credentials may not see the bucket"),
        ("GET ", 403, "InvalidAccessKeyId", "the server refuses the credentials"),
        ("GET ", 403, "AccessDenied", r"may not list the bucket \(AccessDenied\)"),
        ("POST ", 403, "AccessDenied", r"may not write \(AccessDenied\)"),
        ("GET ", 301, "PermanentRedirect", "the bucket is in another region"),
        ("GET ", 403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
    ],
)
def test_what_a_preflight_says(
    bucket: Any, make_release: MakeRelease, pattern: str, status: int, code: str, message: str
) -> None:
    bucket.server.faults = [Fault(pattern, status=status, code=code, times=10)]
    with pytest.raises(UserError, match=message) as refused:
        bucket.target().preflight(make_release("one"))
    assert "the-secret" not in str(refused.value)
    assert "the-key" not in str(refused.value)


def test_a_bucket_or_server_that_is_not_there(bucket: Any, make_release: MakeRelease) -> None:
    with pytest.raises(UserError, match="there is no bucket nowhere"):
        StorageTarget("s3://nowhere", "r", bucket.server.url).preflight(make_release("one"))
    with pytest.raises(StageError, match="the server does not answer"):
        StorageTarget("s3://bucket", "r", "http://127.0.0.1:9").preflight(make_release("one"))


def test_a_server_of_the_environment(bucket: Any, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.url)
    assert StorageTarget(bucket.url, "r").publish(make_release("one"), candidate=False, progress=TOLD).current
    assert "current.json" in bucket.objects()


@pytest.mark.parametrize(
    ("endpoint", "warned"),
    [("http://minio.internal:9000", True), ("http://127.0.0.1:9000", False), ("https://minio.internal", False)],
)
def test_a_connection_that_others_can_read(bucket: Any, endpoint: str, warned: bool) -> None:
    assert StorageTarget(bucket.url, "r", endpoint)._objects.insecure == (endpoint if warned else None)
