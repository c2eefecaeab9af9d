from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.quality import stored_bits
from tests.e2e.project import Project
from tests.serving.served.cases import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_five_bits_pass_at_a_margin_of_a_point(tmp_path: Path, warm_python: Path) -> None:
    project = Project(tmp_path, tmp_path / "no-vllm", warm_python)
    done = project.run("run", "tiny-mxfp4-auto")
    assert done.returncode == 0, done.stderr
    assert "PASS  tiny-mxfp4-auto" in done.stdout
    assert stored_bits(MODEL, tmp_path / "published" / "tiny-mxfp4-auto") <= 5
