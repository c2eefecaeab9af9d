"""quantmint recipe init, list, show and schema, and quantmint schemes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import click

from quantmint.pipeline.base import hardware
from quantmint.pipeline.base.schemes import Format, Scheme, element_title, table
from quantmint.pipeline.commands.options import FILE, emit, json_option

FORMATS: tuple[str, ...] = get_args(Format)
_COLUMNS = ("scheme", "bits", "weights", "activations", *FORMATS, "calibrated", "native on")
"""Headings; a layout's column holds the engines that make the scheme in it."""
_SCALES = {"e8m0": ", E8M0", "e4m3": ", E4M3"}
_GRANULARITY = {"per_tensor": "tensor", "per_channel": "channel", "per_token": "token"}


@click.command(name="list")
@json_option
def list_recipes(as_json: bool) -> None:
    """List the recipes of ./recipes and the shipped ones, with their descriptions.

    Example: quantmint recipe list
    """
    from quantmint.pipeline.recipe.load import load_recipe, recipe_names

    recipes = [load_recipe(name).recipe for name in recipe_names()]
    if as_json:
        emit([{"name": recipe.name, "description": recipe.description} for recipe in recipes])
        return
    from quantmint.pipeline.commands.tables import paragraph, terminal

    console = terminal()
    for recipe in recipes:
        click.echo(paragraph(console, f"{recipe.name:<22} ", recipe.description))


@click.command(name="show")
@click.argument("recipe")
@json_option
def show(recipe: str, as_json: bool) -> None:
    """Print RECIPE (a name or a YAML file) with everything inherited and every default written out.

    Example: quantmint recipe show llama70b-fp8kv
    """
    from quantmint.pipeline.recipe.load import load_recipe

    loaded = load_recipe(recipe)
    if as_json:
        emit(loaded.recipe.model_dump(mode="json"))
    else:
        click.echo(loaded.text_resolved, nl=False)


@click.command(name="init")
@click.argument("model")
@click.option("--name", help="Of the recipe (default: the model's and the scheme's).")
@click.option("--text", type=FILE, help="Prose of your own: most of it calibrates, a part is held out and judged.")
@click.option(
    "--target", type=click.Choice(list(hardware.table())), help="What it is served on (default: this machine)."
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Accelerators of a server.")
@click.option(
    "--scheme", type=click.Choice([*table(), "auto"]), help="Default: four bits where the target computes in them."
)
@click.option("--publish", metavar="PLACE", help="A folder, org/name or s3://bucket/prefix (default: ./published).")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("recipes"), show_default=True)
@json_option
def init(model: str, text: Path | None, gpus: int, folder: Path, as_json: bool, **answers: str | None) -> None:
    """Write a recipe for MODEL (a folder, or org/name of the Hub), with a calibration set and a suite from --text.

    A person at a terminal is asked for what no option says. Nothing is written over, fetched or run.

    Example: quantmint recipe init models/support-3b --text manuals.md --target mi300x
    """
    from quantmint.pipeline.base.machine import Host
    from quantmint.pipeline.recipe.draft import (
        DraftOptions,
        default_name,
        default_scheme,
        draft,
        model_name,
        passages,
        split,
        write,
    )
    from quantmint.pipeline.recipe.faults import refuse
    from quantmint.pipeline.recipe.load import load_recipe, shipped_for
    from quantmint.pipeline.serving.host.detect import detect
    from quantmint.pipeline.stages.checks import check

    def answer(option: str, question: str, default: str) -> str:
        typed = answers[option]
        if typed is not None or as_json or not sys.stdin.isatty():
            return default if typed is None else typed
        return str(click.prompt(question, default=default, err=True))

    target = answer("target", "served on", detect(Host()).hardware)
    scheme = answer("scheme", "scheme", default_scheme(target))
    name = answer("name", "name", default_name(model, scheme))
    publish = answer("publish", "published to", "published")
    written = write(
        draft(DraftOptions(model, name, target, scheme, text, publish, gpus), folder),
        prove=lambda recipe: refuse(check(load_recipe(recipe))),
    )
    shipped = shipped_for(model_name(model))
    if as_json:
        emit({"recipe": name, "files": [str(path) for path in written], "shipped": shipped})
        return
    for path in written:
        click.echo(path)
    if text is not None:
        held_out, calibrating = split(passages(text))
        click.echo(f"{text.name}: {len(calibrating)} passages calibrate, {len(held_out)} are held out", err=True)
    if shipped:
        click.echo(f"shipped for this model: {', '.join(shipped)} (quantmint recipe show NAME)", err=True)
    shown = name if folder == Path("recipes") else written[-1]
    click.echo(f"\nquantmint plan {shown}    # what it takes\nquantmint run {shown}")


@click.command(name="schema")
def schema() -> None:
    """Print the JSON Schema of recipes, for editors that complete and check them.

    Example: quantmint recipe schema > recipe.schema.json
    """
    from quantmint.pipeline.recipe.json_schema import schema_text

    click.echo(schema_text(), nl=False)


@click.command(name="schemes")
@click.option("--markdown", is_flag=True, help="Print the table as docs/schemes.md has it.")
@json_option
def schemes(markdown: bool, as_json: bool) -> None:
    """List the schemes: the numbers they store, the engines that make them in each layout, and where they run natively.

    An FP8 KV cache goes with every scheme; its scales are calibrated.

    Example: quantmint schemes
    """
    if as_json:
        emit([_facts(scheme) for scheme in table().values()])
        return
    rows = [_cells(scheme) for scheme in table().values()]
    if markdown:
        click.echo(f"| {' | '.join(_COLUMNS)} |\n|---|--:|" + "---|" * (len(_COLUMNS) - 2))
        for name, *cells in rows:
            click.echo(f"| `{name}` | {' | '.join(cells)} |")
        return
    from quantmint.pipeline.commands.tables import table as make
    from quantmint.pipeline.commands.tables import terminal

    shown = make(*_COLUMNS, right=("bits",), rows=rows)
    for column in shown.columns[2:]:
        column.no_wrap = False  # only the name must stay in one piece on a narrow terminal
    terminal().print(shown)


def _facts(scheme: Scheme) -> dict[str, Any]:
    """Return a scheme's facts as words.

    ``makers`` are its engines by format, ``native`` the hardware that multiplies it.
    """
    weight, activations = scheme.weight, scheme.activations
    rows, columns = weight.group or (0, 0)
    share = _GRANULARITY.get(weight.granularity, f"{rows} x {columns}" if rows > 1 else f"{columns}")
    computed = "16 bit"
    if activations.dtype is not None:
        by = _GRANULARITY.get(str(activations.granularity), f"{activations.group}")
        computed = f"{element_title(activations.dtype)} per {by}{', static' if activations.kind == 'static' else ''}"
    makers = {name: scheme.makers(name) if name in scheme.formats else () for name in FORMATS}
    return {
        "scheme": scheme.name,
        "description": scheme.description,
        "bits_per_weight": scheme.bits_per_weight,
        "weights": f"{element_title(weight.dtype)} per {share}{_SCALES.get(weight.scale, '')}",
        "activations": computed,
        "makers": makers,
        "calibration": scheme.needs_ranges,
        "native": hardware.native_on(scheme.name),
        "formats": [name for name in FORMATS if makers[name]],
        "engines": list(dict.fromkeys(engine for engines in makers.values() for engine in engines)),
    }


def _cells(scheme: Scheme) -> list[str]:
    facts = _facts(scheme)
    instinct = {name for name, row in hardware.table().items() if row.kind == "rocm"}
    everywhere = instinct <= set(facts["native"])
    native = [name.upper() for name in facts["native"] if not (everywhere and name in instinct)]
    return [
        scheme.name,
        f"{scheme.bits_per_weight:.4g}",
        facts["weights"],
        facts["activations"],
        *(", ".join(facts["makers"][name]) or "-" for name in FORMATS),
        "yes" if scheme.needs_ranges else "no",
        ", ".join([*(["Instinct"] if everywhere else []), *native]) or "-",
    ]
