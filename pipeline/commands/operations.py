"""What was done to a place, or would be, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from pipeline.publish.target import Operation


def as_json(operations: Sequence[Operation]) -> list[dict[str, object]]:
    """One object for each, in their order; ``bytes`` is null where there is no size."""
    return [{"verb": one.verb, "what": one.what, "bytes": one.size} for one in operations]


def show(operations: Sequence[Operation], *, indent: str = "") -> None:
    """A line for each."""
    from pipeline.commands.tables import size

    for one in operations:
        line = f"{indent}{one.verb:<8}{one.what}"
        click.echo(line if one.size is None else f"{line}  {size(one.size)}")
