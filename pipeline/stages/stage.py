"""The stage protocol: a name, what the result depends on, the work, and what planner, runner and preflight ask of it.

A plan is a tuple of `Planned`: every fingerprint is known before anything runs, because it follows from settings,
versions and the fingerprints of the inputs, never from the results.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quantmint.eval.measurements import Side
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.recipe.quantization import AUTO
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction
from quantmint.pipeline.store.entries import Entry

if TYPE_CHECKING:
    from quantmint.pipeline.base.processes import Conversation
    from quantmint.pipeline.serving.plan import LaunchPlan
    from quantmint.pipeline.serving.running.server import RunningServer


class ServerPool(Protocol):
    """The server processes of a run, as its stages see them; `stages.servers.Servers` implements the protocol."""

    def get(self, side: str, plan: LaunchPlan) -> RunningServer:
        """Return the running server of a side, started if need be. Raises `ServingError` where it does not start."""

    def fresh(self, side: str, plan: LaunchPlan, log: Path) -> AbstractContextManager[RunningServer]:
        """Start a server of ``side`` for this block, with its log in ``log``.

        Every other running server is stopped first; the server itself stops when the block ends.
        """

    def lm_eval(self, env: Mapping[str, str], secrets: Collection[str]) -> tuple[Conversation, Path]:
        """Return a conversation with lm-eval's process, and the path of its log; the process ends with the run.

        ``env`` are its variables and ``secrets`` the names of the secret variables that it may have. Raises
        `StageError` where it does not start.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """One execution of a stage: its working folder, its input entries, and where it reports progress.

    ``inputs`` maps the names of `Stage.inputs` to entries. ``again`` says that the stage is made again on purpose
    (`--redo`), so that nothing that earlier runs kept is reused.
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

    ``known`` maps the names of files that were hashed while they were written to (size in bytes, SHA-256).
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

    ``key`` is its name in a plan, ``family`` its folder in the store; ``version`` is raised when the same inputs give
    another result. ``needs`` are the keys of the stages that it starts from, ``packages`` the distributions whose
    versions shape the result's bytes.

    ``asks_server``: the stage serves or asks a model, and the gate reads its entry. ``measures``: a `MeasurementError`
    in the stage makes the run INVALID. ``releases``: it runs after a PASS only. ``evidence``: its files are part of a
    release. ``by_content``: an earlier run's time predicts this one's only where the fingerprint is the same.
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
        """Return whether the recipe needs this stage; by default False while its schemes are still to be chosen."""
        return setting.recipe.quantization.scheme != AUTO

    def when_stopped(self) -> Stage | None:
        """Return the stage that replaces this one in a run that the canary stopped, None where it is left out.

        By default it is the stage itself, unless the stage measures or releases.
        """
        return None if self.measures or self.releases else self

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the stages whose results this stage reads: names in `Job.inputs`, mapped to keys of stages."""
        return dict(zip(self.needs, self.needs, strict=True))

    def reads(self, stage: Stage) -> bool:
        """Return whether this stage also reads ``stage``, an earlier one of the plan, under the key of ``stage``."""
        return False

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the parts of the recipe and of its files that change the result, for the fingerprint."""
        return {}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the tools that change the result, by distribution; they enter the fingerprint."""
        return versions(*self.packages)

    def run(self, job: Job) -> Output:
        """Do the work in ``job.path``, resuming from the files that an earlier attempt left there."""
        raise NotImplementedError

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Return whether the files outside the store that ``entry`` refers to are unchanged.

        True for a stage without any.
        """
        return True

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs: optional modules that the stage imports, and the extras that install them."""
        return ()

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return functions to call before a run that would reach this stage.

        Each raises an error where its condition fails.
        """
        return ()

    def disk(self, setting: Setting, size: Prediction, begun: int) -> Mapping[str, int]:
        """Return the bytes that the stage still has to write, by purpose.

        An earlier attempt wrote ``begun`` bytes of them.
        """
        return {}

    def seconds(self, estimate: Estimate) -> float | None:
        """Return the forecast seconds of the stage on the estimate's machine, None where nothing is known."""
        return None

    def seconds_again(self, planned: Planned, seconds: float, before: Entry | None, setting: Setting) -> float:
        """Return the forecast seconds of the stage from an earlier run, which took `seconds`; by default the same.

        `before` is that run's entry, None where the store no longer has it.
        """
        return seconds

    def require_sound(self, entry: Entry) -> None:
        """Raise `QuantmintError` where the stage's result ends the run; by default nothing is raised."""

    def verdict(self, entry: Entry) -> Verdict | None:
        """Return the verdict that the result gives to the run, None for a result that gives none."""
        return None

    def stops(self, entry: Entry) -> bool:
        """Return whether the result stops the run, which then continues with each remaining stage's `when_stopped`."""
        return False


@dataclass(frozen=True)
class SideStage(Stage):
    """A stage that a plan has twice: for the baseline and for the candidate."""

    side: Side

    @property
    def key(self) -> str:
        """Return the family and the side, such as "serve-baseline"."""
        return f"{self.family}-{self.side}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage in a plan: its inputs (names to stage keys), and the payload that its fingerprint is computed of."""

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
        """Return whether ``names`` contain the stage's key or its family."""
        return self.key in names or self.family in names


def write_gzip(path: Path, value: object) -> None:
    """Write compact JSON, compressed; the same value is the same bytes. Raises `ValueError` for NaN and infinities."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_gzip(path: Path) -> Any:
    """Return the value that `write_gzip` wrote."""
    return json.loads(gzip.decompress(path.read_bytes()))


def write_json(path: Path, value: object) -> None:
    """Write JSON to a temporary file and rename it to ``path``, so that no reader sees half of it.

    Raises `ValueError` for NaN and infinities.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
