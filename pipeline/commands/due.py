"""quantmint due [RECIPES...]"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from pipeline.commands.options import emit, json_option, store_option, vllm_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.upkeep.due.due import Due

SOMETHING_DUE: Final = 10
"""Exit code where at least one recipe is due: 1 to 5 are verdicts and errors."""
_BROKEN: Final = 2
_SHOWN: Final = 3  # phrases of a table's cell


@click.command(name="due")
@click.argument("recipes", nargs=-1)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose recipes are looked at where none is named (default: ./recipes).",
)
@click.option("--explain", is_flag=True, help="List every change, and which stages a run would make.")
@click.option("--device", default="auto", show_default=True, help="Where calibration and quantization would compute.")
@vllm_option
@store_option
@json_option
def command(
    recipes: tuple[str, ...],
    folder: Path | None,
    explain: bool,
    device: str,
    vllm: str | None,
    store_path: Path,
    as_json: bool,
) -> int:
    """Say which RECIPES (names or YAML files) would come out otherwise than when they were last published, and why.

    Held against the newest release are the model's commit, the data sets', the recipe, the tools and what serves.
    Nothing is run and nothing large is fetched; what cannot be asked is told, and makes nothing due. Without RECIPES
    all of ./recipes are looked at. Ends with 10 where something is due, else 5 where a release cannot be read, else 2
    where a recipe is broken, else 0.
    """
    from pipeline.base.progress import reporter_for
    from pipeline.serving.environment import serving_image
    from pipeline.store.files import DamagedError
    from pipeline.store.tree import Store
    from pipeline.upkeep.due.due import all_recipes, look

    serving_image()  # a wrong one is one error, and not one of each recipe
    reporter = reporter_for(json=as_json)
    store = Store(store_path, on_warning=reporter.warn)
    named = recipes or all_recipes(folder)
    found = look(tuple(dict.fromkeys(named)), store=store, vllm=vllm, device=device, tell=reporter.say)
    for sentence in dict.fromkeys(sentence for one in found for sentence in one.unknown):
        reporter.warn(sentence)
    due = sum(one.state == "due" for one in found)
    if as_json:
        emit({"due": due, "recipes": [one.to_json() for one in found]})
    else:
        _print(found, explain)
    if due:
        return SOMETHING_DUE
    if any(one.state == "damaged" for one in found):
        return DamagedError.exit_code
    return _BROKEN if any(one.state == "broken" for one in found) else 0


def _print(found: Sequence[Due], explain: bool) -> None:
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        click.echo(f"{one.name:<{width}}  {one.state:<7}  {_release(one)}  {_reason(one)}")
        for line in _explained(one) if explain else ():
            click.echo(f"  {line}")
        if not explain and one.state == "due":
            click.echo(f"  reruns: {_reruns(one)}")


def _reason(one: Due) -> str:
    """A few phrases: ``--explain`` has them all."""
    first, *more = one.reason.splitlines() or [""]
    phrases = first.split("; ")
    left = len(phrases) - _SHOWN
    told = "; ".join(phrases[:_SHOWN]) + (f"; and {left} more" if left > 0 else "")
    return f"{told} (and {len(more)} more lines: --explain)" if more else told


def _reruns(one: Due) -> str:
    """The stages that a run would make, both sides of a stage as one."""
    keys = [key for key, state in one.stages if state == "rerun"]
    if keys and len(keys) == len(one.stages):
        return "all stages"
    families = [key.removesuffix("-baseline").removesuffix("-candidate") for key in keys]
    return ", ".join(dict.fromkeys(families)) or "-"


def _release(one: Due) -> str:
    from datetime import UTC, datetime

    if one.release is None:
        return "-"
    age = datetime.now(UTC) - datetime.fromisoformat(one.release.created)
    return f"{one.release.tag} ({_age(age.total_seconds())})"


def _age(seconds: float) -> str:
    hours = int(seconds // 3600)
    return f"{hours // 24} d" if hours >= 48 else f"{hours} h" if hours else f"{max(0, int(seconds // 60))} min"


def _explained(one: Due) -> Iterator[str]:
    from pipeline.upkeep.due.causes import phrase

    if one.release is not None:
        readers = one.release.shown
        other = "" if readers in (None, one.release.tag) else f", readers get {readers}"
        created = one.release.created[:16].replace("T", " ")
        yield f"released: {one.release.tag} of {created} UTC in {one.release.place}{other}"
    yield from one.reason.splitlines()[1:]
    for change in one.changes:
        yield f"{change.cause}: {phrase(change)}  [{change.stage} {change.path}]"
    if one.stages:
        yield f"reruns: {_reruns(one)}"
