"""quantmint publish, and quantmint release list, promote, rollback and prune."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from quantmint.eval.report.numbers import size
from quantmint.pipeline.base.errors import UserError, shown_path
from quantmint.pipeline.base.progress import Reporter, reporter_for
from quantmint.pipeline.commands.options import emit, json_option, store_option, vllm_option
from quantmint.pipeline.commands.tables import plain, table, terminal
from quantmint.pipeline.publish.addresses import EXPECTED, open_destination, override_destinations, recipe_destinations
from quantmint.pipeline.publish.destination import ListedRelease, Operation, Publication, without_candidates
from quantmint.pipeline.recipe.destinations import KINDS
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quantmint.pipeline.runs.runner import RunOutcome
    from quantmint.pipeline.stages.setting import Setting
    from quantmint.pipeline.stages.stage import Planned

_MAY_RUN = ("report", "package", "sign", "publish")
"""What names the places, or puts files together; everything before it was proven by a run."""
_dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


def _places_options(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command with an option for each kind of destination."""
    for kind in KINDS:
        shown = "This repository" if "/" in kind.metavar else f"{kind.metavar}/NAME"
        text = f"{shown}, instead of the recipe's places."
        command = click.option(f"--{kind.key}", metavar=kind.metavar, help=text)(command)
    return command


@click.command(name="publish")
@click.argument("recipe")
@click.option("--to", type=click.Choice(["release", "candidate"]), help="Instead of what the recipe says.")
@_places_options
@_dry_run_option
@vllm_option
@store_option
@json_option
def publish(
    recipe: str,
    to: str | None,
    dry_run: bool,
    vllm: str | None,
    store_path: Path,
    as_json: bool,
    **places: str | None,
) -> int:
    """Publish a finished run of RECIPE that passed: nothing is measured or quantized.

    It goes to the recipe's destinations, or to those that are named here. A release that is there already is left as it
    is, so the same command finishes what was interrupted; `quantmint release rollback` goes back to an earlier one.

    Example: quantmint publish llama70b-fp8kv --hub my-org/Llama-70B-FP8
    """
    from quantmint.pipeline.runs.planner import build_plan, foreseen, missing_stages
    from quantmint.pipeline.runs.preflight import require_means
    from quantmint.pipeline.runs.search import stand_in
    from quantmint.pipeline.runs.session import open_setting

    reporter = reporter_for(json=as_json)
    setting = stand_in(open_setting(recipe, store=Store(store_path, on_warning=reporter.warn), vllm=vllm))
    section = override_destinations(setting.recipe.publish, places, to=to)
    changed = setting.recipe.model_copy(update={"publish": section})
    setting = replace(setting, loaded=replace(setting.loaded, recipe=changed))
    plan = foreseen(build_plan(setting), setting)
    missing = [key for key in missing_stages(plan, setting) if key not in _MAY_RUN]
    if missing:
        raise UserError(
            f"{recipe} has no finished run of its current state: {', '.join(missing)} would have to run",
            hint=f"`quantmint run {recipe}` runs them, `quantmint explain {recipe}` says why.",
        )
    require_means(plan, setting)
    do = _foresee if dry_run else _publish
    return do(plan, setting, reporter, as_json=as_json)


@click.command(name="list", epilog=f"DESTINATION is {EXPECTED}.")
@click.argument("place", metavar="DESTINATION")
@json_option
def releases(place: str, as_json: bool) -> None:
    """List the releases at DESTINATION, the newest first, and which of them readers get.

    Example: quantmint release list published/llama70b-fp8kv
    """
    there = open_destination(place)
    releases = there.releases()
    if as_json:
        emit({"place": there.address, "releases": [asdict(release) for release in releases]})
        return
    if not releases:
        click.echo(f"nothing is published in {shown_path(there.address)}", err=True)
        return

    rows = [
        (
            release.tag,
            f"{release.created[:16].replace('T', ' ')} UTC",
            "current" if release.current else "candidate" if release.candidate else "",
            "-" if release.size is None else size(release.size),
            plain(release.title),
        )
        for release in releases
    ]
    terminal().print(table("tag", "date", "", "size", "title", right=("size",), rows=rows))


@click.command(name="promote")
@click.argument("place", metavar="DESTINATION")
@click.argument("tag", required=False)
@_dry_run_option
@json_option
def promote(place: str, tag: str | None, dry_run: bool, as_json: bool) -> None:
    """Promote a candidate at DESTINATION to the current release; TAG says which one where several wait.

    Its files were sent when it was published: none is sent again. `quantmint release rollback` undoes it.

    Example: quantmint release promote my-org/Llama-70B-FP8
    """
    _change("promote", place, tag, dry_run=dry_run, as_json=as_json)


@click.command(name="rollback")
@click.argument("place", metavar="DESTINATION")
@click.argument("tag")
@_dry_run_option
@json_option
def rollback(place: str, tag: str, dry_run: bool, as_json: bool) -> None:
    """Make TAG, an earlier release at DESTINATION, the current one again, byte for byte.

    Nothing is removed: the release that it replaces can be rolled back to in the same way.

    Example: quantmint release rollback published/llama70b-fp8kv v20261102-91be07aa
    """
    _change("rollback", place, tag, dry_run=dry_run, as_json=as_json)


def _change(way: Literal["promote", "rollback"], place: str, tag: str | None, *, dry_run: bool, as_json: bool) -> None:
    there = open_destination(place)
    done = getattr(there, way)(tag, dry_run=dry_run, progress=reporter_for(json=as_json))
    if as_json:
        named = {"tag": tag} if way == "rollback" else {}
        emit({"place": there.address, **named, "dry_run": dry_run, "operations": _as_json(done)})
        return
    _show(done)
    if not done:
        click.echo(f"{tag} is the current release of {shown_path(there.address)} already")
    elif not dry_run:
        current = next((release.tag for release in there.releases() if release.current), None)
        click.echo(f"current  {current or '-'} of {shown_path(there.address)}")


@click.command(name="prune")
@click.argument("place", metavar="DESTINATION")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="The newest N releases stay, candidates not counted.",
)
@_dry_run_option
@json_option
def prune(place: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Remove old releases from DESTINATION, never the current one or a candidate.

    Releases count from the newest. The current release stays although it is older, and so do all candidates.

    Example: quantmint release prune published/llama70b-fp8kv --keep 3
    """
    there = open_destination(place)
    done = there.prune(keep=keep, dry_run=dry_run, progress=reporter_for(json=as_json))
    if as_json:
        removed = [operation.what for operation in done]
        emit({"place": there.address, "removed": removed, "dry_run": dry_run, "operations": _as_json(done)})
        return
    _show(done)
    if not done:
        click.echo(f"{shown_path(there.address)}: nothing to remove; {_reasons_to_keep(there.releases(), keep)}")


def _reasons_to_keep(listed: Sequence[ListedRelease], keep: int) -> str:
    """Return a sentence on why releases of a destination stay when only the newest ``keep`` are kept."""
    releases = without_candidates(listed)
    newest = ", ".join(release.tag for release in releases[:keep]) or "none"
    parts = [f"the newest {keep} of {len(releases)} stay ({newest})"]
    parts += [f"{release.tag} stays because readers get it" for release in releases[keep:] if release.current]
    if candidates := [release.tag for release in listed if release.candidate]:
        parts.append(f"{len(candidates)} candidate{'s are' if len(candidates) > 1 else ' is'} not counted")
    return ", ".join(parts)


def published_by(outcome: RunOutcome) -> Sequence[Publication]:
    """Return the publications of a run, one for each destination; empty where nothing was published."""
    from quantmint.pipeline.stages.publish import published_in

    entry = outcome.entry("publish")
    return () if entry is None else published_in(entry)


def show_published(published: Sequence[Publication], setting: Setting) -> None:
    """Print a line for each destination: its name for vLLM, and the tag."""
    for publication in published:
        place = shown_path(publication.place)
        waits = setting.recipe.publish.to == "candidate" and not publication.current
        there = "  was there already" if publication.again else ""
        waiting = f"  a candidate: quantmint release promote {place}" if waits else ""
        current = _current_in(publication.place)
        if current not in (None, publication.tag) and not waits:
            waiting = (
                f"  readers get {current}: quantmint release rollback {place} {publication.tag} gives them this one"
            )
        click.echo(f"checkpoint  {place}  {publication.tag}{there}{waiting}")


def _current_in(place: str) -> str | None:
    """Return the tag of the current release of a published folder; None for any other destination."""
    folder = Path(place)
    return folder.resolve().name if folder.is_symlink() else None


def _publish(plan: Sequence[Planned], setting: Setting, reporter: Reporter, *, as_json: bool) -> int:
    from quantmint.pipeline.runs.runner import run_plan

    outcome = run_plan(plan, setting, reporter, redo=("publish",))
    publications, verdict = published_by(outcome), _verdict(outcome)
    if as_json:
        facts = {"recipe": setting.recipe.name, "verdict": verdict, "dry_run": False}
        emit({**facts, "published": [asdict(publication) for publication in publications]})
    elif publications:
        show_published(publications, setting)
    else:
        click.echo(f"nothing was published: the verdict is {verdict}")
    return outcome.exit_code


def _foresee(plan: Sequence[Planned], setting: Setting, reporter: Reporter, *, as_json: bool) -> int:
    """Put the release together, and print what each destination would do; return the exit code.

    No keyless signature is made, because it would be public forever.
    """
    from quantmint.pipeline.runs.planner import missing_stages
    from quantmint.pipeline.runs.runner import run_plan
    from quantmint.pipeline.stages import package
    from quantmint.pipeline.stages.publish import require_proof
    from quantmint.pipeline.store.gc import forget

    section = setting.recipe.publish
    logged = section.sign is not None and section.sign.keyless and "sign" in missing_stages(plan, setting)
    skipped = ("sign", "publish") if logged else ("publish",)
    outcome = run_plan([planned for planned in plan if planned.key not in skipped], setting, reporter)
    forget(setting.store.root, outcome.run)
    facts: dict[str, object] = {"recipe": setting.recipe.name, "dry_run": True}
    entries = {step.planned.key: step.entry for step in outcome.steps}
    if "package" not in entries:
        if as_json:
            emit({**facts, "verdict": _verdict(outcome), "places": []})
        else:
            click.echo(f"nothing would be published: the verdict is {_verdict(outcome)}")
        return outcome.exit_code
    require_proof(entries["quantize"], entries["gate"])
    release = package.release(entries)
    operations = []
    for place in recipe_destinations(setting.recipe, setting.home):
        place.preflight(release)
        signing = (Operation("sign", "all of it, in Sigstore's public log"),) if logged else ()
        todo = place.planned_operations(release, candidate=section.to == "candidate")
        operations.append((place.address, (*signing, *todo)))
    if as_json:
        places = [{"place": address, "operations": _as_json(todo)} for address, todo in operations]
        release_facts = {"tag": release.tag, "identity": release.identity, "title": release.title}
        emit({**facts, "verdict": "PASS", **release_facts, "bytes": release.size, "places": places})
        return outcome.exit_code
    click.echo(f"{release.tag}  {release.title}  {size(release.size)}")
    for address, todo in operations:
        click.echo(f"\n{shown_path(address)}" + ("" if todo else ": nothing to do, it is there"))
        _show(todo, indent="  ")
    return outcome.exit_code


def _verdict(outcome: RunOutcome) -> str:
    return "missing" if outcome.verdict is None else outcome.verdict.value


def _as_json(operations: Sequence[Operation]) -> list[dict[str, object]]:
    return [{"verb": operation.verb, "what": operation.what, "bytes": operation.size} for operation in operations]


def _show(operations: Sequence[Operation], *, indent: str = "") -> None:
    for operation in operations:
        line = f"{indent}{operation.verb:<9}{operation.what}"
        click.echo(line if operation.size is None else f"{line}  {size(operation.size)}")
