"""quantmint recipes [NAME]"""

from __future__ import annotations

import click

from pipeline.commands.options import emit, json_option


@click.command(name="recipes")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> int:
    """List the recipes by name, or print NAME with everything inherited and every default written out."""
    from pipeline.recipe.load import load_recipe, recipe_names

    if name is not None:
        loaded = load_recipe(name)
        if as_json:
            emit(loaded.recipe.model_dump(mode="json"))
        else:
            click.echo(loaded.text_resolved, nl=False)
        return 0
    found = [load_recipe(known).recipe for known in recipe_names()]
    if as_json:
        emit([{"name": recipe.name, "description": recipe.description} for recipe in found])
        return 0
    for recipe in found:
        click.echo(f"{recipe.name:<22} {recipe.description}")
    return 0
