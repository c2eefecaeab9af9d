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
from pipeline.stages.planning import build_plan, find_entry, foreseen, known_unsound, missing_stages
from pipeline.stages.session import assemble
from pipeline.stages.source import identify
from pipeline.stages.stage import Planned, Setting, SourceIdentity
from pipeline.store.tree import Store
from pipeline.upkeep.due.answers import Answers
from pipeline.upkeep.due.releases import Released


@dataclass(frozen=True, slots=True)
class Now:
    """A recipe as it would be run now.

    ``recipe`` is what of it shapes results; ``stages`` are those that a run would go through; ``judged`` is the verdict
    that a run of this store came to on these very inputs, None for a PASS and where there was none.
    """

    setting: Setting
    plan: tuple[Planned, ...]
    recipe: Mapping[str, Any]
    stages: tuple[tuple[str, Literal["rerun", "cached"]], ...]
    judged: Verdict | None

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
    *,
    store: Store,
    vllm: str | None,
    device: str,
) -> Now:
    """Plan a recipe as a run would, on whatever machine.

    Raises `UnaskedError` where a model or a data set did not answer, `UserError` for what no run could be made of.
    """
    try:
        identity, folder = _source(loaded, answers, store)
    except QuantmintError:
        refuse(check(loaded))  # what is wrong in the file is told first
        raise
    config = read_json(folder / "config.json")
    refuse(check(loaded, config=config))
    commits = Commits(answers.dataset)
    setting = assemble(loaded, identity, config, store=store, vllm=vllm, device=device, commits=commits)
    plan = build_plan(setting)
    followed = foreseen(plan, setting)
    missing = missing_stages(followed, setting)
    return Now(
        setting=setting,
        plan=plan,
        recipe=yaml.safe_load(loaded.text_proven),
        stages=tuple((planned.key, "rerun" if planned.key in missing else "cached") for planned in followed),
        judged=_judged(plan, followed, setting),
    )


def _source(loaded: LoadedRecipe, answers: Answers, store: Store) -> tuple[SourceIdentity, Path]:
    """The model, and the folder with its config.json."""
    source = loaded.recipe.source
    if source.repo is None:
        identity = identify(source, loaded.source_folder, store.root)
        return identity, Path(str(identity.folder))
    base = answers.base(source.repo, str(source.revision))
    return SourceIdentity(None, base.commit, source.repo), base.folder


def _judged(plan: Sequence[Planned], followed: Sequence[Planned], setting: Setting) -> Verdict | None:
    """What these inputs were found to be, if not good enough to be released."""
    if known_unsound(plan, setting):
        return Verdict.FAIL
    gate = next((planned for planned in followed if planned.key == "gate"), None)
    entry = None if gate is None else find_entry(gate, setting)
    verdict = Verdict.PASS if entry is None else Verdict(str(entry.record.result["verdict"]))
    return None if verdict is Verdict.PASS else verdict
