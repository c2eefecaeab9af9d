"""Releases as they are published, small and with a manifest that the strict reader takes; and a bucket for them."""

from __future__ import annotations

import functools
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.publish import manifest as manifests
from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.manifest import HardwareRecord, Manifest, ServingRecord, SourceRecord, StageRecord
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE, Release, tag_of
from quantmint.pipeline.store import objects
from quantmint.pipeline.store.files import File
from tests.publish.s3_server import S3Server

MakeRelease = Callable[..., Release]
_A = "a" * 64


@pytest.fixture
def make_release(tmp_path: Path) -> MakeRelease:
    """``make_release("one", day=21)``: a release named ``r`` whose contents begin with "one".

    ``files`` adds contents by name; ``signed`` adds a signature, which no digest covers. The same arguments lead to the
    same release, written anew.
    """

    def make(content: str, *, day: int = 21, files: Mapping[str, bytes] | None = None, signed: str = "") -> Release:
        root = tmp_path / "store" / f"{content}-{day}"
        names = ("config.json", "model.safetensors", "quantmint/samples/a.json")
        contents = {name: f"{content} {name} ".encode() * 50 for name in names} | dict(files or {})
        held = {name: _written(root / name, data) for name, data in contents.items()}
        moment = datetime(2026, 11, day, 12, tzinfo=UTC)
        raw = manifests.encode(_manifest(content, moment, held))
        held[MANIFEST] = _written(root / MANIFEST, raw)
        if signed:
            held[SIGNATURE] = _written(root / SIGNATURE, signed.encode())
        identity = manifests.identity(raw)
        return Release("r", tag_of(moment, identity), identity, f"the model {content}", held)

    return make


def _written(path: Path, data: bytes) -> File:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return File(path, len(data), hashlib.sha256(data).hexdigest())


def _manifest(content: str, moment: datetime, files: Mapping[str, File]) -> Manifest:
    when = moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    payload = {"stage": "source", "version": 1, "inputs": {}, "settings": {"sha256": _A}, "tools": {}}
    recipe = {"name": "r"}
    return Manifest(
        name="r",
        title=f"the model {content}",
        created=when,
        artefact=_A,
        verdict="PASS",
        base=SourceRecord(None, None, _A, {"config.json": _A}),
        recipe=recipe,
        recipe_fingerprint=fingerprint(recipe),
        stages={"source": StageRecord(fingerprint(payload), 1, when, when, {}, payload)},
        datasets=(),
        tools={},
        serving=ServingRecord("vllm 0.32.0", None),
        hardware=HardwareRecord(None, "AMD Instinct MI300X", "mi300x"),
        files=manifests.digests(files),
        quantmint="0.1.0",
    )


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all: buckets have names of their own. Its clients read Amazon's descriptions once, not once a client."""
    from botocore.loaders import JSONFileLoader

    known = functools.cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: known(path))
        server = S3Server()
        yield server
        server.close()


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket of a server without faults, and credentials for it alone."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "the-key",
        "AWS_SECRET_ACCESS_KEY": "the-secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "FIRST_WAIT", timedelta(milliseconds=1))
    found = Bucket(s3_server, f"bucket-{uuid.uuid4().hex[:12]}")
    s3_server.forget()
    found.client("create_bucket")
    s3_server.forget()
    return found


@dataclass(frozen=True)
class Bucket:
    """A bucket, with the way of the tests to look into it."""

    server: S3Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/models"

    def client(self, operation: str, **arguments: Any) -> Any:
        import boto3

        client = boto3.client("s3", endpoint_url=self.server.url, region_name="us-east-1")
        return getattr(client, operation)(Bucket=self.name, **arguments)

    def objects(self) -> list[str]:
        found = self.client("list_objects_v2").get("Contents", [])
        return [item["Key"].removeprefix("models/r/") for item in found]

    def place(self, name: str = "r") -> BucketDestination:
        return BucketDestination(self.url, name, self.server.url)
