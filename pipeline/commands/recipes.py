"""quantmint recipes, schema, schemes: what can be made, and how it is written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import click

from pipeline.base import hardware
from pipeline.base.schemes import Format, Scheme, table
from pipeline.commands.options import emit, json_option

FORMATS: tuple[str, ...] = get_args(Format)
COLUMNS = ("scheme", "bits", "weights", "activations", *FORMATS, "calibrated", "native on")
"""Headings; a layout's column holds the engines that make the scheme in it."""
REFRESH = "quantmint schemes --markdown docs/schemes.md"
"""The command that brings the page up to date."""
_BEGIN, _END = f"<!-- made by `{REFRESH}` -->", "<!-- end of schemes -->"
_TYPES = {"e4m3": "FP8", "e2m1": "FP4", "e2m3": "FP6 e2m3", "e3m2": "FP6 e3m2", "int8": "INT8", "int4": "INT4"}
_GRANULARITY = {"per_tensor": "tensor", "per_channel": "channel", "per_token": "token"}


@click.command(name="recipes")
@click.argument("name", required=False)
@json_option
def recipes(name: str | None, as_json: bool) -> int:
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


@click.command(name="schema")
def schema() -> int:
    """Print the JSON Schema of recipes, for editors that complete and check them."""
    from pipeline.recipe.json_schema import schema_text

    click.echo(schema_text(), nl=False)
    return 0


@click.command(name="schemes")
@click.option(
    "--markdown",
    "document",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write the table into this file, between the lines that mark it; - prints it.",
)
@json_option
def schemes(document: Path | None, as_json: bool) -> int:
    """List the schemes: what they store, which engines make them in each layout, and where they run as they are.

    An FP8 KV cache goes with every scheme; its scales are calibrated.
    """
    if document is not None:
        if str(document) == "-":
            click.echo(markdown())
            return 0
        try:
            changed = refresh(document)
        except (ValueError, OSError) as error:
            raise click.UsageError(f"--markdown: {document}: {error}") from None
        click.echo(f"{document}: {'written' if changed else 'up to date'}")
        return 0
    rows = scheme_rows()
    if as_json:
        emit([row.to_json() for row in rows])
        return 0
    from rich.console import Console

    from pipeline.commands.tables import table as make

    shown = make(*COLUMNS, right=("bits",))
    for column in shown.columns[2:]:
        column.no_wrap = False  # only the name must stay in one piece on a narrow terminal
    for row in rows:
        shown.add_row(*row.cells())
    Console(highlight=False).print(shown)
    return 0


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """One scheme in words.

    ``makers`` are the engines by layout; ``calibration`` says whether the inputs of its layers must be measured;
    ``native`` are the accelerators that multiply it as it is stored.
    """

    scheme: str
    description: str
    bits_per_weight: float
    weights: str
    activations: str
    makers: Mapping[str, tuple[str, ...]]
    calibration: bool
    native: tuple[str, ...]

    def cells(self) -> list[str]:
        """What stands in each of `COLUMNS`."""
        engines = [", ".join(self.makers[name]) or "-" for name in FORMATS]
        bits = f"{self.bits_per_weight:.4g}"
        measured = "yes" if self.calibration else "no"
        return [self.scheme, bits, self.weights, self.activations, *engines, measured, short(self.native) or "-"]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields, with the layouts and engines as lists of their own."""
        formats = [name for name in FORMATS if self.makers[name]]
        engines = dict.fromkeys(engine for name in FORMATS for engine in self.makers[name])
        return {**asdict(self), "formats": formats, "engines": list(engines)}


def scheme_rows() -> tuple[SchemeRow, ...]:
    """Every scheme, in the order of the table."""
    return tuple(_row(scheme) for scheme in table().values())


def _row(scheme: Scheme) -> SchemeRow:
    weight, activations = scheme.weight, scheme.activations
    rows, columns = weight.group or (0, 0)
    share = _GRANULARITY.get(weight.granularity, f"{rows} x {columns}" if rows > 1 else f"{columns}")
    computed = "16 bit"
    if activations.dtype is not None:
        by = _GRANULARITY.get(str(activations.granularity), f"{activations.group}")
        computed = f"{_TYPES[activations.dtype]} per {by}{', static' if activations.kind == 'static' else ''}"
    return SchemeRow(
        scheme=scheme.name,
        description=scheme.description,
        bits_per_weight=scheme.bits_per_weight,
        weights=f"{_TYPES[weight.dtype]} per {share}{', E8M0' if scheme.is_mx else ''}",
        activations=computed,
        makers={name: scheme.makers(name) if name in scheme.formats else () for name in FORMATS},
        calibration=scheme.needs_ranges,
        native=hardware.native_on(scheme.name),
    )


def markdown() -> str:
    """The table as Markdown, between the lines that mark it."""
    titles = [f"{title} " for title in COLUMNS]
    lines = [f"| {'| '.join(titles)}|", "|---|--:|" + "---|" * (len(COLUMNS) - 2)]
    lines += [f"| `{cells[0]}` | {' | '.join(cells[1:])} |" for cells in map(SchemeRow.cells, scheme_rows())]
    return "\n".join([_BEGIN, *lines, _END])


def short(accelerators: tuple[str, ...]) -> str:
    """Accelerators in short: ``MI350X, MI355X``, or ``Instinct`` where it is every one of them."""
    known = hardware.table()
    instinct = tuple(name for name in known if known[name].kind == "rocm")
    rest = [name.upper() for name in accelerators if name not in instinct or not set(instinct) <= set(accelerators)]
    return ", ".join([*(["Instinct"] if set(instinct) <= set(accelerators) else []), *rest])


def refreshed(text: str) -> str:
    """A document with its table of schemes as it is now; `ValueError` where the lines that mark it are not there."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"expected the lines {_BEGIN} and {_END}")
    return f"{before}{markdown()}{after}"


def refresh(path: Path) -> bool:
    """Bring the table in a file up to date; whether anything changed. Raises `ValueError` and `OSError`."""
    old = path.read_text(encoding="utf-8")
    new = refreshed(old)
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old
