"""Versions and licences of a stage's distributions, from their metadata."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import ServingError
from quantmint.pipeline.store.toolchain import Environment, environment_here, environment_of


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of distributions beside those that are installed."""
    folder = tmp_path / "site"

    def add(name: str, version: str, *lines: str) -> None:
        place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir(parents=True)
        text = "\n".join(("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines))
        (place / "METADATA").write_text(text + "\n")

    need = "Requires-Dist: "
    add("quantmint", "9", f"{need}Root-Tool[net]; extra == 'x'", f"{need}ours", f"{need}other; extra == 'x'")
    add("root-tool", "1.0", f"{need}plain>=1", f"{need}web; extra == 'net'", f"{need}never; extra == 'gui'",
        f"{need}old; python_version < '3'", "License-Expression: MIT")  # fmt: skip
    add("plain", "2.0+cpu", f"{need}Root_Tool", "License: BSD")
    add("web", "3", "Classifier: License :: OSI Approved :: ISC License", f"{need}not a requirement")
    for name in ("ours", "other", "never", "old"):
        add(name, "4", "License: " + "x" * 200)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def test_requirements_and_requested_extras_are_listed(site: Path) -> None:
    found = environment_here(["root_tool", "not-there"])
    assert {name: (one.version, one.licence) for name, one in found.distributions.items()} == {
        "ours": ("4", None),
        "plain": ("2.0+cpu", "BSD"),
        "quantmint": ("9", None),
        "root-tool": ("1.0", "MIT"),
        "web": ("3", "ISC License"),
    }
    assert Environment.from_json(found.to_json()) == found


def test_another_environment_is_listed_whole() -> None:
    found = environment_of(Path(sys.executable))
    assert found.distributions["pytest"].version == metadata.version("pytest")
    assert found.distributions["torch"].version == metadata.version("torch")


@pytest.mark.parametrize("answer", ["exit 3", "echo no", "true"])
def test_an_interpreter_that_does_not_answer(tmp_path: Path, answer: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    with pytest.raises(ServingError, match="does not say where its packages are"):
        environment_of(python)
    with pytest.raises(ServingError):
        environment_of(tmp_path / "none")
