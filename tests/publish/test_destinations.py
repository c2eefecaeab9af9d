"""A kind of place is known to two modules: where it is named, and where it is spoken to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantmint.pipeline.recipe.destinations import KINDS, DestinationSection, section_of

PIPELINE = Path(__file__).parents[2] / "pipeline"


# What only the Hub has: a token in a schedule's environment, a card whose scores it shows, its own list of releases,
# a model's commit.
BESIDE = {
    "hub": {
        "pipeline/upkeep/schedule/export.py",
        "pipeline/stages/card.py",
        "pipeline/publish/newest.py",
        "pipeline/upkeep/due/answers.py",
    }
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.key != "folder"], ids=lambda kind: kind.key)
def test_two_modules_name_a_kind(kind: type[DestinationSection]) -> None:
    """All but a folder, which is also what `serve` reads, what a report is shown from, and what the disk must hold."""
    name = re.compile(rf"import.*\b{kind.__name__}\b|publish\.{kind.key}\b|\.{kind.key}\.{kind.naming}\b")
    room = f"{kind.client.rpartition('.')[0].removeprefix('quantmint.').replace('.', '/')}"
    room = room if kind.key != "hub" else room.rpartition("/")[0]
    paths = {
        path: path.relative_to(PIPELINE.parent).as_posix()
        for path in PIPELINE.rglob("*.py")
        if path.name != "destinations.py"
    }
    naming = {text for path, text in paths.items() if name.search(path.read_text(encoding="utf-8"))}
    assert {text for text in naming if not text.startswith(room)} == BESIDE.get(kind.key, set())
    assert any(text.startswith(room) for text in naming)


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("published", '{folder: "published"}'),
        ("s3://bucket/models", '{folder: null, storage: {url: "s3://bucket/models"}}'),
        ("hf://org/name", '{folder: null, hub: {repo: "org/name"}}'),
    ],
)
def test_what_init_writes(text: str, section: str) -> None:
    assert section_of(text) == section
