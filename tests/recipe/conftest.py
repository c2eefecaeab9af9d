"""A folder to write recipes in, and a loader for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into an empty working directory; faults name it by that relative path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write: Write) -> Callable[[str], LoadedRecipe]:
    return lambda text: load_recipe(write(text))


@pytest.fixture
def message(write: Write) -> Callable[[str], str]:
    """The whole message that a recipe is refused with."""

    def message(text: str) -> str:
        path = write(text)
        with pytest.raises(RecipeError) as refused:
            load_recipe(path)
        return str(refused.value)

    return message
