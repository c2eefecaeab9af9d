"""The stage protocol: a name, what the result depends on, the work, and what planner, runner and preflight ask of it.

A plan is a tuple of `Planned`: every fingerprint is known before anything runs, because it follows from settings,
versions and the fingerprints of the inputs, never from the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from quantmint.eval.measurements import Side
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.recipe.schema import AUTO
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction
from quantmint.pipeline.store.entries import Entry

if TYPE_CHECKING:
    from quantmint.pipeline.base.processes import Conversation
    from quantmint.pipeline.serving.plan import LaunchPlan
    from quantmint.pipeline.serving.running.server import RunningServer


class ServerPool(Protocol):
    """The servers of a run: one at a time."""

    def get(self, side: str, plan: LaunchPlan) -> RunningServer:
        """Return the running server of a side, started if need be. Raises `ServingError` where it does not start."""

    def fresh(self, side: str, plan: LaunchPlan, log: Path) -> AbstractContextManager[RunningServer]:
        """Start a server for this block, with its log in ``log``; it ends with the block, and other servers end before
        it.
        """

    def lm_eval(self, env: Mapping[str, str], secrets: Collection[str]) -> tuple[Conversation, Path]:
        """Return lm-eval with these variables and secrets of ours, and its log; it ends with the run.

        Raises `StageError` where it does not start.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """One execution of a stage: its folder, the entries that it starts from, and where it reports progress.

    ``again``: the stage is made again on purpose (`--redo`), so nothing that earlier runs kept is reused.
    """

    setting: Setting
    path: Path
    inputs: Mapping[str, Entry]
    progress: Progress
    servers: ServerPool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a stage beside its files: small facts for later stages, and one line for people.

    ``known`` gives size and SHA-256 of files that were hashed while they were written.
    """

    result: Mapping[str, object]
    summary: str
    known: Mapping[str, tuple[int, str]] = field(default_factory=dict)


MODEL_MODULES = (("quantize", "torch"), ("quantize", "transformers"))
"""The modules that run or quantize a model in this process, each after our extra that installs it."""
Check = Callable[[Setting], None]
"""Raises `UserError` where a stage of this setting could not come to its end."""


@dataclass(frozen=True)
class Stage:
    """A kind of work, described so that planner, runner, preflight, forecast and package need not know its name.

    ``key`` is its name in a plan, ``family`` its folder in the store, ``version`` counts changes of what it makes.
    ``needs`` are the keys of the stages that it starts from, ``packages`` those whose versions shape the result's
    bytes, where no setting decides that.

    ``asks_server``: a running server answers it, and the gate reads what it recorded. ``measures``: a
    `MeasurementError` in it makes the run INVALID. ``releases``: it runs after a PASS only. ``evidence``: its files are
    part of a release. ``by_content``: an earlier run tells its time only where the fingerprint is the same.
    """

    family: ClassVar[str]
    version: ClassVar[int]
    needs: ClassVar[Sequence[str]] = ()
    packages: ClassVar[Sequence[str]] = ()
    asks_server: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    releases: ClassVar[bool] = False
    evidence: ClassVar[bool] = False
    by_content: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """Return the family's name; a family with several stages in a plan overrides this."""
        return self.family

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe needs this stage; one whose schemes are still to be chosen needs hardly any."""
        return setting.recipe.quantization.scheme != AUTO

    def when_stopped(self) -> Stage | None:
        """Return the stage in its place in a run that the canary stopped, None where there is none.

        By default the stage itself, unless it measures or releases.
        """
        return None if self.measures or self.releases else self

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the keys of the stages whose results it reads, by the names that `Job.inputs` has for them."""
        return dict(zip(self.needs, self.needs, strict=True))

    def reads(self, stage: Stage) -> bool:
        """Return whether it also starts from ``stage``, an earlier one of the plan, under that stage's own key."""
        return False

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return what of the recipe, and of the files that it names, changes the result: part of the fingerprint."""
        return {}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the tools that change the result, by name: part of the fingerprint."""
        return versions(*self.packages)

    def run(self, job: Job) -> Output:
        """Do the work in ``job.path``, going on with what an earlier attempt left there."""
        raise NotImplementedError

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Return whether the files outside the store that the entry stands for are still as they were."""
        return True

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Yield the modules that it imports beside the core ones, each after our extra that installs it."""
        return ()

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return what must hold before a run starts that would reach this stage."""
        return ()

    def disk(self, setting: Setting, size: Prediction, begun: int) -> Mapping[str, int]:
        """Return the bytes that it writes on the store's disk, by purpose; ``begun`` were written by an earlier try."""
        return {}

    def seconds(self, estimate: Estimate) -> float | None:
        """Return the forecast of its time on the estimate's machine, None where nothing is known of it."""
        return None

    def seconds_again(self, planned: Planned, seconds: float, before: Entry | None, setting: Setting) -> float:
        """Return the forecast of its time from an earlier run, which took `seconds` and may have left its entry."""
        return seconds

    def require_sound(self, entry: Entry) -> None:
        """Raise `QuantmintError` where the result ends the run."""

    def verdict(self, entry: Entry) -> Verdict | None:
        """Return the verdict that the result gives to the run, None for a stage that judges nothing."""
        return None

    def stops(self, entry: Entry) -> bool:
        """Return whether the result, a verdict, ends all that is long: the run goes on with `when_stopped`."""
        return False


@dataclass(frozen=True)
class SideStage(Stage):
    """A stage that a plan has for each side."""

    side: Side

    @property
    def key(self) -> str:
        """Return the family's name with the side."""
        return f"{self.family}-{self.side}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage with its place in a plan."""

    stage: Stage
    inputs: Mapping[str, str]
    payload: Mapping[str, object]
    fingerprint: str

    @property
    def key(self) -> str:
        """The stage's name in the plan."""
        return self.stage.key

    @property
    def family(self) -> str:
        """The stage's folder in the store."""
        return self.stage.family

    def among(self, names: Collection[str]) -> bool:
        """Return whether the stage is named, by its key or its family."""
        return self.key in names or self.family in names


def write_json(path: Path, value: object) -> None:
    """Write JSON by a temporary name, so that a reader never meets half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
