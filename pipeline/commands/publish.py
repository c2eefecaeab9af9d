"""quantmint publish RECIPE"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option, store_option, vllm_option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.progress import Reporter
    from pipeline.runner import Outcome
    from pipeline.stage import Planned, Setting

_MAY_RUN = ("report", "package", "sign", "publish")
"""What names the places, or puts files together; everything before it was proven by a run."""


@click.command(name="publish")
@click.argument("recipe")
@click.option("--to", type=click.Choice(["release", "candidate"]), help="Instead of what the recipe says.")
@click.option("--hub", metavar="ORG/NAME", help="This repository, instead of the recipe's places.")
@click.option("--folder", metavar="FOLDER", help="FOLDER/NAME, instead of the recipe's places.")
@click.option("--storage", metavar="URL", help="URL/NAME, instead of the recipe's places.")
@click.option("--dry-run", is_flag=True, help="Print what would be done to each place.")
@vllm_option
@store_option
@json_option
def command(
    recipe: str,
    to: str | None,
    hub: str | None,
    folder: str | None,
    storage: str | None,
    dry_run: bool,
    vllm: str | None,
    store_path: Path,
    as_json: bool,
) -> int:
    """Publish what a finished run of RECIPE left in the store, if it passed: nothing is measured, nothing quantized.

    To the places of the recipe, or to those that are named here; several may be named. A release that is there is left
    as it is, so that the same command finishes what was interrupted. Readers get it back where a run chose another one,
    and not where a person did.
    """
    from pipeline.planning import build_plan, foreseen, missing_stages
    from pipeline.preflight import require_means
    from pipeline.progress import reporter_for
    from pipeline.publish.elsewhere import elsewhere
    from pipeline.session import open_setting
    from pipeline.store.tree import Store

    reporter = reporter_for(json=as_json)
    setting = open_setting(recipe, store=Store(store_path, on_warning=reporter.warn), vllm=vllm)
    section = elsewhere(setting.recipe.publish, to=to, hub=hub, folder=folder, storage=storage)
    changed = setting.recipe.model_copy(update={"publish": section})
    setting = replace(setting, loaded=replace(setting.loaded, recipe=changed))
    plan = foreseen(build_plan(setting), setting)
    _refuse_unfinished(recipe, [key for key in missing_stages(plan, setting) if key not in _MAY_RUN])
    require_means(plan, setting)
    publish = _foresee if dry_run else _publish
    return publish(plan, setting, reporter, as_json=as_json)


def _refuse_unfinished(recipe: str, missing: Sequence[str]) -> None:
    from pipeline.errors import UserError

    if missing:
        raise UserError(
            f"{recipe} has no finished run of its current state: {', '.join(missing)} would have to run",
            hint=f"`quantmint run {recipe}` runs them, `quantmint explain {recipe}` says why.",
        )


def _publish(plan: Sequence[Planned], setting: Setting, reporter: Reporter, *, as_json: bool) -> int:
    """Ask every place, also where the store says that it was published there."""
    from pipeline.commands import published
    from pipeline.runner import run_plan

    outcome = run_plan(plan, setting, reporter, redo=("publish",))
    found, verdict = published.of(outcome), _verdict(outcome)
    if as_json:
        told = {"recipe": setting.recipe.name, "verdict": verdict, "dry_run": False}
        emit({**told, "published": published.as_json(found)})
    elif found:
        published.show(found, setting)
    else:
        click.echo(f"nothing was published: the verdict is {verdict}")
    return outcome.exit_code


def _foresee(plan: Sequence[Planned], setting: Setting, reporter: Reporter, *, as_json: bool) -> int:
    """Put the release together in the store, and ask every place what it would take.

    A signature without a key is not made for that: Sigstore writes it into a public log, for ever.
    """
    from pipeline.commands import operations
    from pipeline.commands.tables import size
    from pipeline.planning import missing_stages
    from pipeline.publish.opening import targets_of
    from pipeline.publish.target import Operation
    from pipeline.runner import run_plan
    from pipeline.stages.publish import release_of, require_proof

    section = setting.recipe.publish
    logged = section.sign is not None and section.sign.keyless and "sign" in missing_stages(plan, setting)
    left = ("sign", "publish") if logged else ("publish",)
    outcome = run_plan([planned for planned in plan if planned.key not in left], setting, reporter)
    told: dict[str, object] = {"recipe": setting.recipe.name, "dry_run": True}
    entries = {step.planned.key: step.entry for step in outcome.steps}
    if "package" not in entries:
        if as_json:
            emit({**told, "verdict": _verdict(outcome), "places": []})
        else:
            click.echo(f"nothing would be published: the verdict is {_verdict(outcome)}")
        return outcome.exit_code
    require_proof(entries["quantize"], entries["gate"])
    release = release_of(entries)
    found = []
    for target in targets_of(setting):
        target.preflight(release)
        todo = target.operations(release, candidate=section.to == "candidate")
        if section.to == "release":
            todo = (*todo, *target.bring_back(release.tag, dry_run=True, progress=reporter))
        signing = (Operation("sign", "all of it, in Sigstore's public log"),) if logged else ()
        found.append((target.place, (*signing, *todo)))
    if as_json:
        places = [{"place": place, "operations": operations.as_json(todo)} for place, todo in found]
        release_facts = {"tag": release.tag, "identity": release.identity, "title": release.title}
        emit({**told, "verdict": "PASS", **release_facts, "bytes": release.size, "places": places})
        return outcome.exit_code
    click.echo(f"{release.tag}  {release.title}  {size(release.size)}")
    for place, todo in found:
        click.echo(f"\n{operations.shown(place)}" + ("" if todo else ": nothing to do, it is there"))
        operations.show(todo, indent="  ")
    return outcome.exit_code


def _verdict(outcome: Outcome) -> str:
    return "missing" if outcome.verdict is None else outcome.verdict.value
