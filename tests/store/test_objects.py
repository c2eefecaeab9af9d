"""Objects below a URL: conditional writes in a folder, translated errors, and unencrypted addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.store import objects as module
from quantmint.pipeline.store.objects import Objects


@pytest.fixture
def folder(tmp_path: Path) -> Objects:
    (tmp_path / "objects").mkdir()
    return Objects(f"file://{tmp_path}/objects")


def test_put_if_replaces_only_the_object_with_the_expected_mark(folder: Objects) -> None:
    assert folder.put_if("pointer", b"first", None)
    assert not folder.put_if("pointer", b"second", None), "another was there"
    seen = folder.read("pointer")
    assert seen is not None
    assert folder.put_if("pointer", b"second", seen.mark)
    assert not folder.put_if("pointer", b"third", seen.mark), "it is another one now"
    after = folder.read("pointer")
    assert after is not None
    assert after.data == b"second"


def test_an_object_that_was_removed_meanwhile_is_not_made_again(folder: Objects) -> None:
    assert folder.put_if("pointer", b"first", None)
    seen = folder.read("pointer")
    assert seen is not None
    folder.remove("pointer")
    assert not folder.put_if("pointer", b"second", seen.mark)
    assert folder.read("pointer") is None


@pytest.mark.parametrize(
    ("endpoint", "insecure"),
    [
        ("http://10.0.0.1:9000", True),
        ("http://127.0.0.1:9000", False),
        ("https://10.0.0.1:9000", False),
        ("https://127.0.0.1:9000", False),
        (None, False),
    ],
)
def test_only_plain_http_to_another_machine_can_be_read_on_the_way(endpoint: str | None, insecure: bool) -> None:
    assert Objects("s3://bucket/models", endpoint).insecure == (endpoint if insecure else None)


def test_errors_of_the_storage_are_ours_and_mistakes_of_the_program_are_not(
    folder: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        error: Exception = PermissionError("no entry")

        def put(self, *_: Any, **__: Any) -> None:
            raise self.error

    broken = Broken()
    monkeypatch.setattr(module, "_obstore", lambda: broken)
    with pytest.raises(QuantmintError, match="no entry"):
        folder.put_if("pointer", b"first", None)
    broken.error = TypeError("a mistake of ours")
    with pytest.raises(TypeError, match="a mistake of ours"):
        folder.put_if("pointer", b"first", None)
