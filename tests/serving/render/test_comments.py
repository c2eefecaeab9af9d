"""YAML that is the same to every reader of it."""

from __future__ import annotations

import pytest
import yaml

from pipeline.recipe.yaml_positions import parse
from pipeline.serving.render.comments import dump


@pytest.mark.parametrize("text", ["y", "N", "yes", "5e8", "1234e56", "1e-3", ".5E+3", "0o17", "017", "1:30", "~", ""])
def test_text_stays_text(text: str) -> None:
    """To YAML 1.1, to 1.2, and to Kubernetes, whose reader takes something of both and `y` besides."""
    written = dump({"value": text})
    assert yaml.safe_load(written) == parse(written, "written").data == {"value": text}
    assert written == f"value: '{text}'\n"


@pytest.mark.parametrize("value", ["you", "1e3x", "8Gi", "a@sha256:5e8", 1000.0, 1e-30, 8, True, None])
def test_nothing_else_is_quoted(value: object) -> None:
    written = dump({"value": value})
    assert "'" not in written
    assert yaml.safe_load(written) == {"value": value}
