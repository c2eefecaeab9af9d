"""The digest of a folder is its content, and is computed once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.quantize import digest
from quantmint.pipeline.quantize.digest import file_digests, folder_digest
from quantmint.pipeline.store.disk import sha256_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"weights" * 1000)
    return place


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read."""
    names: list[str] = []

    def counted(path: Path) -> str:
        names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(digest, "sha256_of", counted)
    return names


def test_a_file_is_read_once(folder: Path, memory: Path, read: list[str]) -> None:
    first = file_digests(folder, memory)
    assert read == ["config.json", "model.safetensors"]
    assert first == {path.name: (path.stat().st_size, sha256_of(path)) for path in folder.iterdir()}
    assert file_digests(folder, memory) == first
    assert len(read) == 2


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"W")


def write_and_turn_back_the_clock(path: Path) -> None:
    before = path.stat()
    write_in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_one_as_old(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"W" + path.read_bytes()[1:])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [write_in_place, write_and_turn_back_the_clock, replace_by_one_as_old])
def test_other_bytes_of_the_same_size_are_noticed(folder: Path, memory: Path, change: Callable[[Path], None]) -> None:
    path = folder / "model.safetensors"
    before = file_digests(folder, memory)
    time.sleep(0.05)  # more than a tick of the filesystem's clock
    change(path)
    after = file_digests(folder, memory)
    assert after["model.safetensors"] == (7000, sha256_of(path))
    assert folder_digest(after) != folder_digest(before)


def test_the_same_content_elsewhere_has_the_same_digest(folder: Path, memory: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "another name"
    shutil.copytree(folder, copy)
    (copy / "notes.md").write_text("not of the model")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "x.json").write_text("{}")
    assert folder_digest(file_digests(copy, memory)) == folder_digest(file_digests(folder, memory))


def test_named_templates_belong_to_the_model_and_its_card_does_not(folder: Path, memory: Path) -> None:
    before = file_digests(folder, memory)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert file_digests(folder, memory) == before
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    assert file_digests(folder, memory).keys() - before.keys() == {"additional_chat_templates/rag.jinja"}
