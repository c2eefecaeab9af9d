"""quantmint schema"""

from __future__ import annotations

import click


@click.command(name="schema")
def command() -> int:
    """Print the JSON Schema of recipes, for editors that complete and check them."""
    from pipeline.recipe.json_schema import schema_text

    click.echo(schema_text(), nl=False)
    return 0
