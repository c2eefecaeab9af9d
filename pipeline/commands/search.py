"""quantmint search MODEL: measure the KL of each scheme by layer, and spend a budget of bits by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantmint.pipeline.commands.options import device_option, emit, json_option, store_option

if TYPE_CHECKING:
    from quantmint.pipeline.quantize.budget import Group, Point
    from quantmint.pipeline.recipe.load import LoadedRecipe
    from quantmint.pipeline.recipe.quantization import Quantization
    from quantmint.pipeline.stages.advice import Advice

_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchRequest:
    """The options of a search, as typed."""

    from_: str | None
    calibration: str | None
    samples: int | None
    sequence_length: int | None
    bits: float | None
    speedup: float | None
    write: Path | None
    plot: Path | None

    @property
    def schemes(self) -> tuple[str, ...] | None:
        """Return the schemes to choose from; None for those of the recipe."""
        return None if self.from_ is None else tuple(self.from_.split(","))

    @property
    def texts(self) -> dict[str, Any] | None:
        """Return the calibration section that replaces the recipe's; None to keep that."""
        if not self.calibration:
            return None
        return {"set": self.calibration, "samples": self.samples, "sequence_length": self.sequence_length}

    def require_one_budget(self) -> None:
        """Raise `click.UsageError` for two budgets, and for a file to write without any."""
        if self.write is not None and self.bits is None and self.speedup is None:
            raise click.UsageError("--write: found it without --bits or --speedup, which say what is written")
        if self.bits is not None and self.speedup is not None:
            raise click.UsageError("--speedup: found it with --bits, expected one of them")


@click.command(name="search")
@click.argument("model")
@click.option(
    "--from",
    "from_",
    metavar="SCHEMES",
    help="Schemes to choose from, with commas between (default: the recipe's, else mxfp4,mxfp4_fp8,ptpc_fp8).",
)
@click.option(
    "--calibration", metavar="SET", help="Calibration set to measure on, a name or a YAML file (default: the recipe's)."
)
@click.option("--samples", type=int, help="Sequences of the set. Half of them are measured on, at most 16.")
@click.option("--sequence-length", type=int, help="Tokens of a sequence (default: the set's, else 2048).")
@click.option("--bits", type=float, help="Print the best choice for so many bits a weight, as a section of a recipe.")
@click.option(
    "--speedup", type=float, help="Print the best choice for so many times the speed of 16 bit on the recipe's target."
)
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), help="Write that choice to a file.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the frontier to this file, .svg or .png."
)
@device_option
@store_option
@json_option
def search(model: str, device: str, store_path: Path, as_json: bool, **options: Any) -> None:
    """Print the frontier of MODEL, a recipe, a folder or organisation/name[@revision]: bits against predicted KL.

    The cost of each group of layers in each scheme is measured once, and kept in the store for all budgets. The KL is
    a prediction, of rounding by the recipe's algorithm. A speedup is an estimate from the target's data sheet, of the
    linear layers alone.

    A run of a recipe with `scheme: auto` and `search:` spends a budget by these costs. After a FAIL it tries more
    bits, after a PASS fewer, in steps of a quarter bit at the least. It publishes the fewest bits that passed.

    Example: quantmint search llama70b-fp8kv --calibration ultrachat --bits 5
    """
    from quantmint.pipeline.base.progress import reporter_for
    from quantmint.pipeline.quantize.budget import frontier, spend
    from quantmint.pipeline.recipe.load import choice_yaml
    from quantmint.pipeline.runs.search import chosen, measured_groups
    from quantmint.pipeline.runs.session import open_setting
    from quantmint.pipeline.stages.advice import Advice, advise_eight_bits
    from quantmint.pipeline.stages.sensitivity import spendable
    from quantmint.pipeline.store.tree import Store

    request = _SearchRequest(**options)
    request.require_one_budget()
    budget, write = request.bits if request.speedup is None else request.speedup, request.write
    loaded, quantization_now = _load(model, request, store_path)
    reporter = reporter_for(json=as_json)
    setting = open_setting(loaded, store=Store(store_path, on_warning=reporter.warn), device=device)
    groups = measured_groups(setting, reporter)
    spendable_groups = spendable(setting, groups)
    points = frontier(spendable_groups)
    point = None if budget is None else spend(spendable_groups, budget)
    text = None if point is None else choice_yaml(chosen(loaded, groups, point).recipe.quantization)
    if write is not None and text is not None:
        write.write_text(text, encoding="utf-8")
    if request.plot is not None:
        _draw(points, point, request.plot)
    advice = Advice() if quantization_now is None or point is not None else advise_eight_bits(quantization_now, groups)
    if as_json:
        answer: dict[str, Any] = {"model": model, "from": list(loaded.recipe.quantization.from_ or ())}
        answer |= _frontier_facts(points, spendable_groups)
        answer |= {} if point is None else {"choice": {**point.to_json(), "recipe": text}}
        emit(answer | ({"advice": advice.lines, "paste": advice.paste} if advice.paste else {}))
        return
    _show(points, point)
    _show_sections(advice, text, write)


def _frontier_facts(points: Sequence[Point], groups: Sequence[Group]) -> dict[str, Any]:
    """Return the frontier's points, and the groups of modules with their options, as JSON values."""
    return {"frontier": [point.to_json() for point in points], "groups": [_group_facts(group) for group in groups]}


def _load(model: str, request: _SearchRequest, store: Path) -> tuple[LoadedRecipe, Quantization | None]:
    """Return a recipe with `scheme: auto` for ``model``, and the quantization of the recipe that it names, if any.

    The quantization is None for a model, and for a recipe that chooses itself. Raises `click.UsageError` for a speedup
    without a recipe.
    """
    from quantmint.eval.records import is_path
    from quantmint.pipeline.base.argument import classify
    from quantmint.pipeline.recipe.load import load_recipe, recipe_of
    from quantmint.pipeline.recipe.quantization import AUTO
    from quantmint.pipeline.runs.oneshot import source_section
    from quantmint.pipeline.runs.search import opened
    from quantmint.pipeline.runs.session import recipe_named
    from quantmint.pipeline.stages.advice import FROM

    schemes, texts, speedup = request.schemes, request.texts, request.speedup
    if classify(model).kind in ("recipe", "name"):
        recipe = load_recipe(recipe_named(model, store) or model)
        quantization = recipe.recipe.quantization
        stated = None
        if texts is not None:
            stated = {name: value for name, value in texts.items() if value is not None}
            if is_path(stated["set"]):
                stated["set"] = str(Path(stated["set"]).absolute())  # relative to here, and not to the recipe's file
        loaded = opened(recipe, schemes, request.bits, speedup, calibration=stated)
        return loaded, None if quantization.scheme == AUTO else quantization
    if speedup is not None:
        raise click.UsageError(f"--speedup: found it with {model}, expected a recipe, which says the target")
    sections: dict[str, Any] = {"source": source_section(model), "calibration": texts}
    sections["quantization"] = {"scheme": "ptpc_fp8", "format": "quark"}  # the layout that holds the most schemes
    return opened(recipe_of(sections), schemes or FROM), None


def _group_facts(group: Group) -> dict[str, Any]:
    """Return a group's name, number of weights, and cost (nats) and bits by scheme, as JSON values."""
    schemes = {option.scheme: {"cost": option.cost, "bits": option.bits} for option in group.options}
    return {"name": group.name, "weights": group.weights, "schemes": schemes}


def _show_sections(advice: Advice, choice: str | None, file: Path | None) -> None:
    """Print the advice with its YAML, and the YAML ``choice``, or the ``file`` that it was written to."""
    for line in ("", *advice.lines, "", advice.paste) if advice.paste else ():
        click.echo(line)
    if choice is not None:
        click.echo(f"\n{choice}" if file is None else f"written to {file}")


def _show(points: Sequence[Point], point: Point | None) -> None:
    from quantmint.pipeline.commands.tables import table, terminal

    shown = {round(index * (len(points) - 1) / max(_ROWS - 1, 1)) for index in range(_ROWS)}
    rows = [*(point_ for index, point_ in enumerate(points) if index in shown), *([] if point is None else [point])]
    schemes = sorted({name for point_ in points for name in point_.counts})
    console = terminal()
    cells = [
        [
            f"{point_.bits:.2f}",
            *([] if point_.speedup is None else [f"{point_.speedup:.2f}"]),
            f"{point_.cost:.4f}",
            *(str(point_.counts.get(name, 0)) for name in schemes),
        ]
        for point_ in sorted(rows, key=lambda point_: point_.bits)
    ]
    columns = ("bits", *(["estimated speedup"] if points[0].speedup else []), "predicted KL", *schemes)
    console.print(table(*columns, right=columns, rows=cells))
    console.print(f"groups by scheme, {len(rows)} of {len(points)} points; KL in nats, predicted")


def _draw(points: Sequence[Point], point: Point | None, path: Path) -> None:
    from quantmint.eval.report.plots import WIDE, figure

    with figure(WIDE, WIDE // 2) as (drawing, axis):
        axis.plot(
            [point_.speedup or point_.bits for point_ in points],
            [point_.cost for point_ in points],
            ".-",
            color="#1769aa",
        )
        if point is not None:
            axis.plot([point.speedup or point.bits], [point.cost], marker="o", color="#c62828")
        spent = "estimated speedup of the linear layers" if points[0].speedup else "bits a weight, scales counted"
        axis.set(xlabel=spent, ylabel="predicted KL, nats", yscale="log")
        axis.grid(visible=True, alpha=0.3)
        drawing.savefig(path, bbox_inches="tight")
