"""From what a person typed to a setting: the recipe checked, the source identified, vLLM found."""

from __future__ import annotations

from pathlib import Path

from eval import suites, workloads
from eval.errors import DefinitionError
from pipeline.errors import RecipeError, UserError
from pipeline.formats.checkpoint import read_json
from pipeline.recipe.checks import check, check_run
from pipeline.recipe.faults import refuse
from pipeline.recipe.load import load_recipe
from pipeline.serving.environment import VllmEnvironment, find_vllm
from pipeline.serving.hardware import local_cpu_flags
from pipeline.stage import Setting, SourceIdentity
from pipeline.stages.source import config_folder, identify
from pipeline.store.tree import Store


def open_setting(
    recipe: str,
    *,
    store: Store,
    vllm: str | None = None,
    device: str = "auto",
    config: Path | None = None,
    to_run: bool = False,
) -> Setting:
    """Everything a plan needs. Refuses a recipe that asks for the impossible before anything is fetched or hashed.

    ``config`` is a folder with a config.json that stands in for the model, for planning where there is no network;
    ``to_run`` also refuses what is declared but not built yet.
    """
    loaded = load_recipe(recipe)
    # The CPU that serves is this one; when only planning it may be another.
    flags = local_cpu_flags() if to_run else None
    refuse([*check(loaded, cpu_flags=flags), *(check_run(loaded) if to_run else [])])
    if config is not None:
        identity = SourceIdentity(None, "unresolved", loaded.recipe.source.repo or "folder")
        facts = read_json(config / "config.json")
    else:
        identity = identify(loaded.recipe.source, loaded.source_folder, store.root)
        facts = read_json(config_folder(identity) / "config.json")
    refuse(check(loaded, config=facts, cpu_flags=flags))
    try:
        suite = suites.load(loaded.recipe.evaluation.suite)
        workload = workloads.load(loaded.recipe.target.workload)
    except DefinitionError as error:
        raise RecipeError(str(error)) from error
    return Setting(
        loaded=loaded,
        store=store,
        source=identity,
        config=facts,
        suite=suite,
        workload=workload,
        vllm=_find_vllm(vllm),
        device=device,
        home=Path.cwd(),
    )


def _find_vllm(explicit: str | None) -> VllmEnvironment | None:
    """The serving environment; a wrong one that was named is an error, a missing one is not until it is needed."""
    try:
        return find_vllm(explicit)
    except UserError:
        import os

        from pipeline.serving.environment import VARIABLE

        if explicit is not None or os.environ.get(VARIABLE):
            raise
        return None
