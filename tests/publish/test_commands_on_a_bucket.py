"""What is typed for a folder or a repository is typed for a bucket too; its server is told by AWS_ENDPOINT_URL."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.base.progress import PlainReporter
from pipeline.commands.cli import main


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The JSON of a command that ends well."""

    def run(*arguments: str) -> Any:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json"])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        return json.loads(out)

    return run


def test_forth_and_back(bucket: Any, make_release: Any, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.url)
    place, progress = f"{bucket.url}/r", PlainReporter(io.StringIO())
    releases = [make_release(content, day=day) for day, content in ((19, "one"), (20, "two"), (21, "three"))]
    first, second, third = (release.tag for release in releases)
    for release in releases:
        bucket.place().publish(release, candidate=release.tag == third, progress=progress)

    def state() -> dict[str, str]:
        return {
            one["tag"]: "current" if one["current"] else "candidate" if one["candidate"] else ""
            for one in call("releases", place)["releases"]
        }

    assert list(state().items()) == [(third, "candidate"), (second, "current"), (first, "")]
    assert call("promote", place, "--dry-run")["operations"]
    assert state()[third] == "candidate"
    call("promote", place)
    assert state() == {third: "current", second: "", first: ""}
    call("rollback", place, first)
    assert state() == {third: "", second: "", first: "current"}
    assert call("prune", place, "--keep", "1")["removed"] == [second]
    assert state() == {third: "", first: "current"}
