"""What is to be served, where, for which load: everything that a launch plan is a function of, as a person names it.

    found = find_model("meta-llama/Llama-3.1-8B-Instruct@main", store=Path("store"))
    request = Request(found, target, profile, version="0.33.0")
    plan, processes = request.plan()

    >>> overrides_of(["max-num-seqs=256", "VLLM_ROCM_USE_AITER=0", "--enforce-eager"])
    {'--max-num-seqs': '256', 'VLLM_ROCM_USE_AITER': '0', '--enforce-eager': True}
    >>> speculation_of("eagle3:/models/draft:2")
    Speculative(method='eagle3', model='/models/draft', tokens=2)

Only small files are read; `fetched` brings the weights of a repository.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval import workloads
from eval.errors import DefinitionError
from pipeline.base.errors import UserError, nearest
from pipeline.base.progress import Progress
from pipeline.publish.places import published_folder, serving_name
from pipeline.recipe.load import LoadedRecipe, load_recipe, recipe_names
from pipeline.recipe.modules import assigned
from pipeline.recipe.schema import Recipe, Speculative
from pipeline.recipe.schema import Source as SourceSection
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.knobs.table import table
from pipeline.serving.model.facts import ModelFacts, as_quantized, model_facts
from pipeline.serving.plan import LaunchPlan, Process, processes
from pipeline.serving.planning.launch_request import KvDtype
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.target import Profile, Target, parse_target, profile, profiles
from pipeline.stages.source import config_folder, fetch, identify
from pipeline.stages.stage import Setting, SourceIdentity
from pipeline.store.tree import Store

_REPO = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\S+))?")
_VERSION = re.compile(r"v?\d+\.\d+(\.\d+)?([.+a-z]\S*)?")
#: vLLM's own words for the fields of a recipe.
_VLLM_KEYS = {"num_speculative_tokens": "tokens"}


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
    from pipeline.stages.session import open_setting

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
    model = str(published_folder(setting.recipe, setting.home) or serving_name(recipe))
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
    from pipeline.stages.planning import build_plan, find_entry
    from pipeline.stages.source import model_folder

    if config is None:
        planned = next(planned for planned in build_plan(setting) if planned.key == "quantize")
        entry = find_entry(planned, setting)
        if entry is not None:
            return model_folder(entry)
    published = published_folder(setting.recipe, setting.home)
    return published if published is not None and (published / "config.json").is_file() else None


@dataclass(frozen=True, slots=True)
class Request:
    """One launch. ``version`` is of the vLLM that is planned for; ``hosts`` are addresses of the nodes, in order."""

    model: ServedModel
    target: Target
    profile: Profile
    version: str
    environment: VllmEnvironment | None = None
    overrides: Mapping[str, str | bool] = field(default_factory=dict)
    kv_cache_dtype: KvDtype | None = None
    speculative: Speculative | None = None
    tunableop: Path | None = None
    pack: int = 1
    arguments: Sequence[str] = ()
    served_model_name: str = "model"
    trust_remote_code: bool = False
    hosts: Sequence[str] = ()
    port: int = 8000

    def plan(self) -> tuple[LaunchPlan, tuple[Process, ...]]:
        """The plan with its processes. Raises `UserError` for what cannot be served there."""
        plan = plan_serving(
            self.model.model,
            self.model.facts,
            target=self.target,
            profile=self.profile,
            vllm_version=self.version,
            overrides=self.overrides,
            speculative=self.speculative,
            kv_cache_dtype=self.kv_cache_dtype,
            served_model_name=self.served_model_name,
            trust_remote_code=self.trust_remote_code,
            cpu_threads=os.cpu_count() or 1,
            packed=self.pack,
            tunableop=None if self.tunableop is None else str(self.tunableop),
            arguments=self.arguments,
        )
        if self.model.revision is not None:
            plan = replace(plan, argv=(*plan.argv, "--revision", self.model.revision))
        if self.model.missing is not None:
            plan = replace(plan, warnings=(f"only planned: {self.model.missing.message}", *plan.warnings))
        return plan, processes(plan, port=self.port, host_ips=self.hosts)


def target_for(text: str | None, recipe: Recipe | None) -> Target:
    """The target that is named, the recipe's, or (``auto``, and where nothing is said) this machine."""
    if text is None and recipe is not None:
        return parse_target(f"{recipe.target.hardware}:{recipe.target.gpus}")
    if text is None or text == "auto":
        from pipeline.base.machine import Machine
        from pipeline.serving.host.detect import detect

        return detect(Machine()).target
    return parse_target(text)


def profile_for(
    text: str | None, recipe: Recipe | None, *, concurrency: int | None, max_model_len: int | None
) -> Profile:
    """The profile that is named, directly or by a workload; else what the recipe is for, else throughput.

    A workload brings its largest concurrency, a recipe also its longest request. Numbers that are given go first.
    """
    if text is None and recipe is None:
        return profile("throughput", concurrency=concurrency, max_model_len=max_model_len)
    length = max_model_len if recipe is None else max_model_len or recipe.target.max_model_len
    if text in profiles():
        return profile(str(text), concurrency=concurrency, max_model_len=length)
    name = text if text is not None else recipe.target.workload if recipe is not None else ""
    if text is not None and text not in workloads.names() and not workloads.is_path(text):
        known = dict.fromkeys((*profiles(), *workloads.names()))
        near = nearest(text, known)
        raise UserError(
            f"--workload: found {text!r}, expected one of {', '.join(known)}"
            + (f" (did you mean {near!r}?)" if near else "")
        )
    try:
        load = workloads.load(name)
    except DefinitionError as error:
        raise UserError(str(error)) from error
    most = load.in_flight
    chosen = load.profile
    if recipe is not None and text is None:
        chosen = recipe.serve.profile or chosen
        most = max(most, recipe.evaluation.concurrency)
    return profile(chosen, concurrency=concurrency or most, max_model_len=length)


def overrides_of(texts: Iterable[str]) -> dict[str, str | bool]:
    """``NAME=VALUE`` each; without a value a flag is on, with ``NAME=false`` the knob is left out.

    The dashes of a flag may be left out. Raises `UserError`, with the nearest spelling, for what is no knob.
    """
    found: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        found[knob_name(name, "--set")] = True if not equals or value == "true" else value != "false" and value
    return found


def knob_name(name: str, where: str) -> str:
    """The table's spelling of a knob. Raises `UserError` for one that it does not have."""
    for spelling in (name, f"--{name.replace('_', '-')}"):
        if spelling in table():
            return spelling
    near = nearest(name, table()) or nearest(f"--{name}", table())
    raise UserError(
        f"{where}: found {name!r}, which is no knob of the table" + (f" (did you mean {near!r}?)" if near else "")
    )


def speculation_of(text: str) -> Speculative:
    """``METHOD[:MODEL]:TOKENS``, or vLLM's JSON object. Raises `UserError`."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise UserError(f"--speculative: found {text!r}, expected a JSON object ({error})") from None
        data: Mapping[str, Any] = {_VLLM_KEYS.get(name, name): value for name, value in given.items()}
    else:
        method, *model, tokens = text.split(":") if ":" in text else (text, "2")
        data = {
            "method": method,
            "model": ":".join(model) or None,
            "tokens": int(tokens) if tokens.isdigit() else tokens,
        }
    try:
        return Speculative.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"--speculative: {field}: {first['msg'].lower()}",
            hint="METHOD[:MODEL]:TOKENS, such as eagle3:/models/draft:2",
        ) from None


def version_of(text: str | None) -> str | None:
    """The version of vLLM that ``--vllm`` names; None where it names a command or an environment."""
    if text is None or Path(text).exists() or not _VERSION.fullmatch(text):
        return None
    return text.removeprefix("v")
