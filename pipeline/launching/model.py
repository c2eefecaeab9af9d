"""Which model is meant: a folder, a repository of the Hub, or what a recipe made, would make or starts from.

    find_model("meta-llama/Llama-3.1-8B-Instruct@main", store=Path("store"))
    find_model("llama8b-ptpc", store=Path("store"), baseline=True)

Only small files are read; `fetched` brings the weights of a repository.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.errors import UserError
from pipeline.progress import Progress
from pipeline.publish.opening import published_folder, serving_name
from pipeline.recipe.faults import nearest
from pipeline.recipe.load import LoadedRecipe, load_recipe, recipe_names
from pipeline.recipe.modules import assigned
from pipeline.recipe.schema import Recipe
from pipeline.recipe.schema import Source as SourceSection
from pipeline.serving.model.facts import ModelFacts, as_quantized, model_facts
from pipeline.stage import Setting, SourceIdentity
from pipeline.stages.source import config_folder, fetch, identify
from pipeline.store.tree import Store

_REPO = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\S+))?")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to plan for.

    ``model`` is what a command line names: an absolute path, or a repository that vLLM would fetch by itself at
    ``revision``. ``missing`` says why it cannot be served from here yet, and is None where it can. ``identity`` is a
    repository's. ``recipe`` is None for a model that no recipe stands behind, ``tunableop`` the file that it names.
    """

    model: str
    facts: ModelFacts
    name: str
    recipe: Recipe | None = None
    revision: str | None = None
    identity: SourceIdentity | None = None
    tunableop: Path | None = None
    missing: UserError | None = None


def find_model(
    text: str, *, store: Path, baseline: bool = False, config: Path | None = None, vllm: str | None = None
) -> ServedModel:
    """The model that a person names; raises `UserError` with the nearest name for one that is not there.

    ``baseline`` takes the 16-bit model of a recipe. ``config`` is a folder with a config.json that stands in for a
    recipe's source where there is no network.
    """
    path = Path(text)
    if path.is_dir():
        if baseline:
            raise UserError(f"--baseline: {text} is a folder, expected a recipe")
        return _folder(path)
    if text.endswith((".yaml", ".yml")) or text in recipe_names():
        return _of_recipe(load_recipe(text), text, store, baseline=baseline, config=config, vllm=vllm)
    found = _REPO.fullmatch(text)
    if found is None:
        near = nearest(text, recipe_names())
        raise UserError(
            f"MODEL: found {text!r}, expected a folder with a model, org/name[@revision] of the Hub, or a recipe"
            + (f" (did you mean {near!r}?)" if near else "")
        )
    if baseline:
        raise UserError(f"--baseline: {text} is a repository, expected a recipe")
    section = SourceSection(repo=found["repo"], revision=found["revision"] or "main")
    return _repository(identify(section, None, store))


def fetched(found: ServedModel, *, with_code: bool, progress: Progress) -> ServedModel:
    """The same with its weights on this machine. Raises `UserError` where nothing that could be served is made."""
    if found.missing is not None:
        raise found.missing
    if found.identity is None or found.identity.folder is not None:
        return found
    folder = fetch(found.identity, with_code=with_code, progress=progress)
    return replace(found, model=str(folder.resolve()), facts=model_facts(folder), revision=None)


def _folder(path: Path) -> ServedModel:
    """A folder may hold no more than a config.json: enough to plan."""
    folder = path.resolve()
    facts = model_facts(folder)
    missing = UserError(
        f"{path} has no *.safetensors, expected a model's weights", hint="--dry-run plans without them."
    )
    return ServedModel(str(folder), facts, folder.name, missing=missing if facts.counted else None)


def _repository(identity: SourceIdentity) -> ServedModel:
    repo = str(identity.repo)
    facts = model_facts(config_folder(identity))
    return ServedModel(repo, facts, repo.rpartition("/")[2], revision=identity.digest, identity=identity)


def _of_recipe(
    loaded: LoadedRecipe, text: str, store: Path, *, baseline: bool, config: Path | None, vllm: str | None
) -> ServedModel:
    from pipeline.session import open_setting

    setting = open_setting(text, store=Store(store), vllm=vllm, config=config)
    recipe = loaded.recipe
    if not baseline and (made := _made(setting, config)) is not None:
        return replace(_folder(made), name=recipe.name, recipe=recipe, tunableop=loaded.tunableop)
    source = _source(setting, config)
    if baseline:
        return replace(source, recipe=recipe, tunableop=loaded.tunableop)
    quantization = recipe.quantization
    facts = as_quantized(
        source.facts,
        scheme=quantization.scheme,
        kv_cache=quantization.kv_cache,
        format=quantization.format,
        assigned=partial(assigned, quantization),
    )
    missing = UserError(
        f"{recipe.name} has made no checkpoint yet",
        hint=f"quantmint run {text} makes it; --baseline serves the 16-bit model, --dry-run plans.",
    )
    model = str(published_folder(setting) or serving_name(recipe))
    return ServedModel(model, facts, recipe.name, recipe=recipe, tunableop=loaded.tunableop, missing=missing)


def _source(setting: Setting, config: Path | None) -> ServedModel:
    """The 16-bit model of a recipe."""
    source = setting.recipe.source
    if setting.loaded.source_folder is not None:
        return _folder(setting.loaded.source_folder)
    if config is not None:  # only planned for: the repository was not asked for its commit
        repo = str(source.repo)
        missing = UserError(f"{repo} was planned for from --config alone", hint="Leave --config out to serve it.")
        return ServedModel(
            repo, model_facts(config), repo.rpartition("/")[2], revision=source.revision, missing=missing
        )
    return _repository(setting.source)


def _made(setting: Setting, config: Path | None) -> Path | None:
    """The recipe's checkpoint: that of its current state in the store, else the one that is published."""
    from pipeline.planning import build_plan, find_entry
    from pipeline.stages.source import model_folder

    if config is None:
        planned = next(planned for planned in build_plan(setting) if planned.key == "quantize")
        entry = find_entry(planned, setting)
        if entry is not None:
            return model_folder(entry)
    published = published_folder(setting)
    return published if published is not None and (published / "config.json").is_file() else None
