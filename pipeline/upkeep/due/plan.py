"""What a recipe would be made from now: its plan, by what is here and what was answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from eval.verdict import Verdict
from pipeline.base.errors import QuantmintError
from pipeline.quantize.formats.checkpoint import read_json
from pipeline.recipe.commits import Commits
from pipeline.recipe.faults import refuse
from pipeline.recipe.load import LoadedRecipe
from pipeline.stages.checks import check
from pipeline.stages.planning import build_plan, find_entry, foreseen, known_unsound, missing_stages, stopped_plan
from pipeline.stages.session import assemble
from pipeline.stages.source import identify
from pipeline.stages.stage import Planned, Setting, SourceIdentity
from pipeline.store.runs import Run
from pipeline.store.tree import Store
from pipeline.upkeep.due.answers import Answers, Base, UnaskedError
from pipeline.upkeep.due.releases import Released

_JUDGED = (0, 1, 3, 4)  # exit codes of runs that came to a verdict


@dataclass(frozen=True, slots=True)
class Now:
    """A recipe as it would be run now.

    ``recipe`` is what of it shapes results; ``stages`` are those that a run would go through; ``judged`` is the verdict
    that a run of this store came to on these very inputs, None for a PASS and where there was none; ``unknown`` are the
    sentences of what was taken to be as the release has it.
    """

    setting: Setting
    plan: tuple[Planned, ...]
    recipe: Mapping[str, Any]
    stages: tuple[tuple[str, Literal["rerun", "cached"]], ...]
    judged: Verdict | None
    unknown: tuple[str, ...]

    @property
    def is_made(self) -> bool:
        """Whether a run would find every stage in the store."""
        return all(found == "cached" for _, found in self.stages)

    def packaged(self) -> str | None:
        """The tag of the release that this store has made from these very inputs; None where it has none."""
        package = next((planned for planned in self.plan if planned.key == "package"), None)
        entry = None if package is None else find_entry(package, self.setting)
        found = None if entry is None else entry.record.result.get("tag")
        return found if isinstance(found, str) else None

    def unpublished(self, release: Released) -> bool:
        """Whether a release lies in this store and is not yet in all places that the recipe names now."""
        return self.packaged() == release.tag and dict(self.stages).get("publish") == "rerun"


def plan_now(
    loaded: LoadedRecipe,
    answers: Answers,
    release: Released | None,
    *,
    store: Store,
    runs: Sequence[Run],
    vllm: str | None,
    device: str,
) -> Now:
    """Plan a recipe as a run would, on whatever machine. What was not answered is taken from the release.

    Raises `UnaskedError` where that does not say it either, `UserError` for what no run could be made of.
    """
    unknown: list[str] = []
    try:
        identity, folder = _source(loaded, answers, release, store, unknown)
    except QuantmintError:
        refuse(check(loaded))  # what is wrong in the file is told first
        raise
    config = read_json(folder / "config.json")
    refuse(check(loaded, config=config))
    commits = Commits(lambda repo, revision: _dataset(repo, revision, answers, release, unknown))
    setting = assemble(loaded, identity, config, store=store, vllm=vllm, device=device, commits=commits)
    plan = build_plan(setting)
    followed = foreseen(plan, setting)
    missing = missing_stages(followed, setting)
    return Now(
        setting=setting,
        plan=plan,
        recipe=yaml.safe_load(loaded.text_proven),
        stages=tuple((planned.key, "rerun" if planned.key in missing else "cached") for planned in followed),
        judged=_judged(plan, followed, setting, runs),
        unknown=tuple(unknown),
    )


def _source(
    loaded: LoadedRecipe, answers: Answers, release: Released | None, store: Store, unknown: list[str]
) -> tuple[SourceIdentity, Path]:
    """The model, and the folder with its config.json."""
    source = loaded.recipe.source
    if source.repo is None:
        identity = identify(source, loaded.source_folder, store.root)
        return identity, Path(str(identity.folder))
    try:
        base = answers.base(source.repo, str(source.revision))
    except QuantmintError as error:
        base = _as_released(source.repo, release, error)
        unknown.append(error.message)
    return SourceIdentity(None, base.commit, source.repo), base.folder


def _as_released(repo: str, release: Released | None, error: QuantmintError) -> Base:
    """The model that a release was made from, as far as the Hub's cache has it; raises ``error`` if it is another."""
    known = None if release is None else release.manifest.base
    if known is None or known.repo != repo or known.commit is None:
        raise error
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo, "config.json", revision=known.commit)
    if not isinstance(path, str):
        raise UnaskedError(error.message)
    return Base(known.commit, Path(path).parent)


def _dataset(repo: str, revision: str, answers: Answers, release: Released | None, unknown: list[str]) -> str:
    try:
        return answers.dataset(repo, revision)
    except QuantmintError as error:
        unknown.append(error.message)
        recorded = () if release is None else release.manifest.datasets
        read = next((data.revision for data in recorded if data.name == repo and data.revision is not None), None)
        if read is None:
            raise
        return read


def _judged(
    plan: Sequence[Planned], followed: Sequence[Planned], setting: Setting, runs: Sequence[Run]
) -> Verdict | None:
    """What these inputs were found to be, if not good enough to be released."""
    if known_unsound(plan, setting):
        return Verdict.FAIL
    gate = next((planned for planned in followed if planned.key == "gate"), None)
    entry = None if gate is None else find_entry(gate, setting)
    if entry is not None:
        verdict = Verdict(str(entry.record.result["verdict"]))
        return None if verdict is Verdict.PASS else verdict
    # What must not be judged has no entry: the stage that found it ended the run.
    judged = [run for run in runs if run.recipe == setting.recipe.name and run.exit_code in _JUDGED]
    if not any(run.exit_code == Verdict.INVALID.exit_code for run in judged):
        return None
    ours = {(planned.stage.family, planned.fingerprint) for planned in (*plan, *stopped_plan(setting))}
    last = next((run for run in judged if ours.issuperset(run.plan)), None)
    return Verdict.INVALID if last is not None and last.exit_code == Verdict.INVALID.exit_code else None
