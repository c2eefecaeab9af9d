"""Which recipes are meant where nobody names any."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import UserError

FOLDER = Path("recipes")


def all_recipes(folder: Path | None = None) -> tuple[str, ...]:
    """The recipes of a folder (None: ``recipes`` below the working directory), by name or path, sorted.

    The shipped ones are examples for whoever names them, and not a team's own; files that begin with an underscore are
    only there to be extended. Raises `UserError` where there is none.
    """
    where = folder or FOLDER
    found = sorted(path for path in where.glob("*.yaml") if not path.name.startswith("_")) if where.is_dir() else []
    if not found:
        raise UserError(
            f"no recipe is named, and {where} has none", hint="Name recipes or YAML files, or a folder by --folder."
        )
    return tuple(path.stem if folder is None else str(path) for path in found)
