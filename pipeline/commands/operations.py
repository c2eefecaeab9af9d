"""What was done to a place, or would be, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipeline.publish.target import Operation
from pipeline.recipe.faults import shown_path


def as_json(operations: Sequence[Operation]) -> list[dict[str, object]]:
    """One object for each, in their order; ``bytes`` is null where there is no size."""
    return [{"verb": one.verb, "what": one.what, "bytes": one.size} for one in operations]


def shown(place: str) -> str:
    """A place as a person would type it from here."""
    path = Path(place)
    return shown_path(path) if path.is_absolute() else place


def show(operations: Sequence[Operation], *, indent: str = "") -> None:
    """A line for each."""
    from pipeline.commands.tables import size

    for one in operations:
        line = f"{indent}{one.verb:<9}{one.what}"
        click.echo(line if one.size is None else f"{line}  {size(one.size)}")
