"""Open a setting from what a person typed: the recipe checked, the source identified, vLLM found."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmint.eval import suites, workloads
from quantmint.pipeline.base.argument import classify
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import local_cpu_flags
from quantmint.pipeline.quantize.formats.checkpoint import read_config
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.recipe.load import LoadedRecipe, load_recipe, recipe_names
from quantmint.pipeline.runs.search import settled
from quantmint.pipeline.serving.environment import VARIABLE, find_vllm, serving_image
from quantmint.pipeline.serving.running.dialect import VLLM, dialect_of
from quantmint.pipeline.serving.running.endpoint import open_endpoints
from quantmint.pipeline.stages.checks import check
from quantmint.pipeline.stages.setting import Commits, Setting, SourceIdentity
from quantmint.pipeline.stages.source import config_folder, identify
from quantmint.pipeline.store.gc import list_runs
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.pipeline.recipe.schema import Recipe
    from quantmint.pipeline.serving.environment import VllmEnvironment
    from quantmint.pipeline.store.remote import RemoteTier


def recipe_named(text: str, store: Path) -> str | None:
    """Return ``text`` if it is a recipe's file or name, else the file from which a recipe of that name last ran.

    None where no such file exists.
    """
    if classify(text).kind == "recipe" or text in recipe_names():
        return text
    files = (run.file for run in list_runs(store) if run.recipe == text and run.file is not None)
    return next((file for file in files if Path(file).is_file()), None)


def open_setting(
    recipe: str | LoadedRecipe,
    *,
    store: Store,
    vllm: str | None = None,
    device: str = "auto",
    config: Path | None = None,
    to_run: bool = False,
    remote: RemoteTier | None = None,
    proven: bool = True,
) -> Setting:
    """Return everything that a plan needs, for a recipe by name, file or content.

    ``config`` is a folder with a config.json that stands in for the model, to plan without a network; ``to_run`` says
    that this machine's CPU serves; ``remote`` is a tier of the store to take entries from. Without ``proven`` nothing
    will be served: no vLLM is looked for, and the source's weights are not hashed. Raises `RecipeError` for a recipe
    with faults, before anything is downloaded or hashed.
    """
    loaded = recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe_named(recipe, store.root) or recipe)
    flags = local_cpu_flags() if to_run else None
    refuse(check(loaded, cpu_flags=flags, judged=proven))
    source, folder = loaded.recipe.source, config or loaded.source_folder
    if folder is None:
        identity = identify(source, None, store.root, hashed=proven)
        folder = config_folder(identity)
    facts = read_config(folder)
    refuse(check(loaded, config=facts, cpu_flags=flags, judged=proven))
    if config is not None:
        identity = SourceIdentity(None, "unresolved", source.repo or "folder")
    elif loaded.source_folder is not None:  # last: hashing the weights takes minutes
        identity = identify(source, folder, store.root, hashed=proven)
    environment = vllm_for(loaded.recipe, vllm) if proven else None
    return assemble(loaded, identity, facts, store=store, vllm=environment, device=device, remote=remote)


def with_endpoints(setting: Setting, texts: Sequence[str]) -> Setting:
    """Return the setting with the running servers that ``SIDE=URL`` texts name; without texts, the setting itself.

    Raises `UserError` for a recipe whose servers a run starts itself, else as `open_endpoints`.
    """
    if not texts:
        return setting
    recipe, dialect = setting.recipe, dialect_of(setting.recipe.serve.runtime)
    if recipe.answered_by != dialect.runtime or dialect is VLLM:
        raise UserError(
            f"--launcher endpoint: found a recipe that {recipe.answered_by} answers for, which a run starts itself; "
            "expected `serve: {runtime: sglang}`",
            hint="Leave --launcher and --endpoint out.",
        )
    return replace(setting, endpoints=open_endpoints(texts, dialect))


def vllm_for(recipe: Recipe, named: str | None) -> VllmEnvironment | None:
    """Return the vLLM that serves a recipe's checkpoints; None if none is installed, or the recipe uses no vLLM.

    Raises `UserError` for a wrong one that is ``named`` by an option or a variable; a missing one is no error until it
    is needed.
    """
    if recipe.answered_by != "vllm":
        return None
    try:
        return find_vllm(named)
    except UserError:
        if named is not None or os.environ.get(VARIABLE):
            raise
        return None


def assemble(
    loaded: LoadedRecipe,
    identity: SourceIdentity,
    config: Mapping[str, Any],
    *,
    store: Store,
    vllm: VllmEnvironment | None = None,
    device: str = "auto",
    remote: RemoteTier | None = None,
    commits: Commits | None = None,
) -> Setting:
    """Return the setting of a checked recipe and its model, with its suite, workload, serving environment and choice.

    ``config`` is the model's config.json. ``commits`` resolves branches of data sets to commits (None: the Hub is asked
    when a plan is made).
    """
    setting = Setting(
        loaded=loaded,
        store=store,
        source=identity,
        config=config,
        suite=suites.load(loaded.recipe.evaluation.suite).judged_by(loaded.recipe.gate.accuracy.margins),
        workload=workloads.load(loaded.recipe.target.workload),
        vllm=vllm,
        device=device,
        home=Path.cwd(),
        remote=remote,
        commits=commits or Commits(),
        image=serving_image(),
    )
    return settled(setting)
