"""Publishes to a bucket until it is killed: ``python -m tests.publish.killed_upload URL ENDPOINT PART RELEASE``."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path

from pipeline.progress import PlainReporter
from pipeline.publish.storage import StorageTarget, multipart

if __name__ == "__main__":
    url, endpoint, part, release = sys.argv[1:]
    multipart.PART = int(part)
    target = StorageTarget(url, "r", endpoint)
    found = pickle.loads(Path(release).read_bytes())  # noqa: S301 - the test's own
    target.publish(found, candidate=False, progress=PlainReporter(io.StringIO()))
