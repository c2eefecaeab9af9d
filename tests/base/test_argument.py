"""Classification of command-line arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantmint.pipeline.base.argument import classify

TAG = "v20261121-3f1c0a52"


@pytest.mark.parametrize(
    ("text", "kind", "place", "revision"),
    [
        ("my-org/here", "folder", "my-org/here", None),
        (f"my-org/here@{TAG}", "folder", "my-org/here", TAG),
        ("odd@name", "folder", "odd@name", None),
        ("hf://my-org/here", "repository", "hf://my-org/here", None),
        ("my-org/there", "repository", "my-org/there", None),
        ("my-org/there@refs/pr/1", "repository", "my-org/there", "refs/pr/1"),
        (f"s3://bucket/x/name@{TAG}", "bucket", "s3://bucket/x/name", TAG),
        ("s3://user:word@bucket/name", "bucket", "s3://user:word@bucket/name", None),
        ("hf://name", "bucket", "hf://name", None),
        ("my-org/r.yaml", "recipe", "my-org/r.yaml", None),
        ("./r.yml", "recipe", "./r.yml", None),
        ("my-org/gate.json", "file", "my-org/gate.json", None),
        ("llama-3.1-ptpc", "name", "llama-3.1-ptpc", None),
        ("a b/c", "name", "a b/c", None),
        ("", "name", "", None),
    ],
)
def test_arguments_are_classified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: str, place: str, revision: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-org/here").mkdir(parents=True)
    (tmp_path / "odd@name").mkdir()
    (tmp_path / "my-org/gate.json").write_text("{}")
    assert classify(text) == (kind, place, revision)
