"""The embedded recipes in four bits, run by their command to their release."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.quality import stored_bits
from tests.e2e.project import Project
from tests.serving.served.cases import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm_python: Path) -> Project:
    """Return a folder in which both recipes are run: they share the baseline's measurements."""
    home = tmp_path_factory.mktemp("four-bits")
    return Project(home, home / "no-vllm", warm_python)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("tiny-mxfp4-auto", 4.75), ("tiny-mxfp4-fp8", 4.251)],  # with the scales of inputs, one for a module
    ids=["a-margin-of-a-point", "w4a8-and-a-wider-margin"],
)
def test_four_bits_pass(project: Project, name: str, bits: float) -> None:
    done = project.run("run", name)
    assert done.returncode == 0, done.stderr
    assert f"PASS  {name}" in done.stdout
    assert stored_bits(MODEL, project.home / "published" / name) <= bits
