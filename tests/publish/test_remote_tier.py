"""The remote tier of the store in a real bucket."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.serving.host.detect import local_device
from quantmint.pipeline.store.remote import open_tier
from quantmint.pipeline.store.tree import Store
from tests.publish.s3_server import Fault

PAYLOAD: dict[str, Any] = {"stage": "evaluate", "version": 1, "inputs": {}, "settings": {"seed": 1}}
DIGEST = fingerprint(PAYLOAD)


def _made(root: Path, content: str) -> Any:
    with Store(root).working("evaluate", DIGEST) as work:
        (work.path / "samples").mkdir()
        (work.path / "samples" / "gsm8k.jsonl").write_text(content * 1000)
        return work.commit(payload=PAYLOAD, result={"score": 0.5}, started=datetime.now(UTC), tools={})


def test_through_a_bucket(bucket: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.url)
    warnings: list[str] = []
    progress = PlainReporter()
    one, other = _made(tmp_path / "one", "one"), _made(tmp_path / "other", "other")

    def tier() -> Any:
        return open_tier(f"s3://{bucket.name}/tier/", warnings.append, local_device)

    assert not tier().offers("evaluate", DIGEST)
    tier().send(one, {}, progress)
    writes = bucket.server.writes()
    assert writes[-1].endswith(f"evaluate/{DIGEST}.json")  # what is not whole has no name
    tier().send(other, {}, progress)  # of another site, which was slower
    assert bucket.server.writes() == writes
    with Store(tmp_path / "two").working("evaluate", DIGEST) as work:
        bucket.server.faults.append(Fault("GET /.*jsonl", status=503))
        brought = tier().bring(work, {}, progress)
    assert brought is not None
    assert brought.file("samples/gsm8k.jsonl").read_text() == "one" * 1000
    assert brought.record.result == {"score": 0.5}
    assert Store(tmp_path / "two").find("evaluate", DIGEST) is not None
    assert warnings == []
