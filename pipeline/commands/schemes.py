"""quantmint schemes"""

from __future__ import annotations

import click

from pipeline.commands.options import emit, json_option


@click.command(name="schemes")
@json_option
def command(as_json: bool) -> int:
    """List the schemes: what they store, in which formats, and which engines make them now."""
    from pipeline.schemes import table

    rows = [
        {
            "scheme": scheme.name,
            "description": scheme.description,
            "bits_per_weight": scheme.bits_per_weight,
            "formats": list(scheme.formats),
            "engines": list(scheme.engines),
        }
        for scheme in table().values()
    ]
    if as_json:
        emit(rows)
        return 0
    from rich.console import Console

    from pipeline.commands.tables import table as make

    shown = make("scheme", "bits a weight", "formats", "engines", "what", right=("bits a weight",))
    for scheme in table().values():
        engines = ", ".join(scheme.engines) or "none yet"
        shown.add_row(
            scheme.name, f"{scheme.bits_per_weight:g}", ", ".join(scheme.formats), engines, scheme.description
        )
    Console(highlight=False).print(shown)
    return 0
