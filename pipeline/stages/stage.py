"""What a stage is: a name, what its result depends on, and the work.

A plan is a tuple of `Planned`: every fingerprint is known before anything runs, because it follows from settings,
versions and the fingerprints of the inputs, never from the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quantmint.calibration.batches import dataset_commit
from quantmint.calibration.errors import CalibrationError
from quantmint.eval.measurements import Side
from quantmint.eval.suites import Suite
from quantmint.eval.workloads import Workload
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.schema import COMMIT, Recipe
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.calibration.calibrate import Places
    from quantmint.pipeline.base.processes import Conversation
    from quantmint.pipeline.quantize.budget import Point
    from quantmint.pipeline.quantize.engines.stream.schedule import WriteShards
    from quantmint.pipeline.serving.environment import VllmEnvironment
    from quantmint.pipeline.serving.plan import LaunchPlan
    from quantmint.pipeline.serving.running.launchers import Cluster
    from quantmint.pipeline.serving.running.server import Server
    from quantmint.pipeline.store.remote import RemoteTier


class Commits:
    """Commits that branches of the Hub's data sets stand for: a plan names them, and what it names is what is read.

    Each is asked once, by what gives the commit of a repository and a revision: the answer stays, and so does that
    there was none. Else a plan that was made while the Hub was away would be run under a fingerprint that is not what
    is read.
    """

    def __init__(self, ask: Callable[[str, str], str] = dataset_commit) -> None:
        self._ask = ask
        self._found: dict[tuple[str, str], str | CalibrationError | QuantmintError] = {}

    def dataset(self, repo: str, revision: str) -> str:
        """The commit of a data set's revision. Raises what the Hub's client was told, each time the same."""
        if COMMIT.fullmatch(revision):
            return revision
        if (key := (repo, revision)) not in self._found:
            try:
                self._found[key] = self._ask(repo, revision)
            except (CalibrationError, QuantmintError) as error:
                self._found[key] = error
        if isinstance(found := self._found[key], str):
            return found
        raise found


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Which 16-bit model: a folder with the digest of its files, or a repository at a commit.

    ``marks``: the files are not hashed; what stands for those of a folder, by name.
    """

    folder: Path | None
    digest: str
    repo: str | None = None
    marks: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """What goes into a fingerprint: the content, and never where it lies."""
        if self.repo is not None:
            return {"repo": self.repo, "commit": self.digest}
        return {"sha256": self.digest} if self.marks is None else {"files": dict(self.marks)}


class Spread(Protocol):
    """Other machines, which see our files, that parts of a stage are given to; no bit depends on them."""

    @property
    def hardware(self) -> str:
        """What computes there, for people."""

    @property
    def write_shards(self) -> WriteShards:
        """Makes the files of a checkpoint."""

    def places(self, folder: Path) -> Places:
        """Where shares of the calibration batches are measured, for a model in ``folder``."""

    def release(self) -> None:
        """End what still holds memory and GPUs there; whoever comes next begins anew."""

    def cluster(self) -> Cluster:
        """How a server on this machine gets at the GPUs there, for a launch over several nodes."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a setting's recipe was chosen by: the recipe as it was ``written``, with `scheme: auto`, and the ``point``.

    The point is None where nothing was measured yet, and the largest scheme stands in for what will be chosen.
    """

    written: LoadedRecipe
    point: Point | None

    def to_json(self) -> dict[str, Any]:
        """Bits of a weight, predicted cost in nats, and groups by scheme; nothing for what stands in."""
        point = self.point
        return {} if point is None else point.to_json()

    @property
    def line(self) -> str:
        """The same for people."""
        if self.point is None:
            return "auto: nothing is measured yet; what follows is of all in the largest scheme"
        counts = ", ".join(f"{count} groups in {name}" for name, count in self.point.counts.items())
        return f"auto: {self.point.spent}, {counts}; predicted cost {self.point.cost:.3g} nats"


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that a run is given.

    ``config`` is the model's config.json; ``vllm`` is None where no serving environment was found; ``device`` is
    PyTorch's name of where calibration and quantization compute; ``home`` is what a publish folder is relative to;
    ``remote`` is a tier of the store that several sites share (None: there is none); ``commits`` says which commits
    branches of data sets stand for; ``image`` is the container that serves, as name@sha256:DIGEST (None: none);
    ``spread`` is what parts of a stage are given to (None: to this process); ``chosen`` is there where ``loaded`` has
    what was chosen in the place of `scheme: auto`.
    """

    loaded: LoadedRecipe
    store: Store
    source: SourceIdentity
    config: Mapping[str, Any]
    suite: Suite
    workload: Workload
    vllm: VllmEnvironment | None
    device: str
    home: Path
    remote: RemoteTier | None = None
    commits: Commits = field(default_factory=Commits)
    image: str | None = None
    spread: Spread | None = None
    chosen: Chosen | None = None

    @property
    def written(self) -> Recipe:
        """The recipe as it was written, resolved."""
        return (self.loaded if self.chosen is None else self.chosen.written).recipe

    @property
    def recipe(self) -> Recipe:
        """The recipe, resolved."""
        return self.loaded.recipe


class Servers(Protocol):
    """The servers of a run: one at a time."""

    def get(self, side: str, plan: LaunchPlan) -> Server:
        """The running server of a side, started if need be. Raises `ServingError` where it does not start."""

    def fresh(self, side: str, plan: LaunchPlan, log: Path) -> AbstractContextManager[Server]:
        """A server that is started for this block and ends with it, its log in ``log``; what ran before is stopped."""

    def lm_eval(self, env: Mapping[str, str], secrets: Collection[str]) -> tuple[Conversation, Path]:
        """lm-eval with these variables, and with the named ones of ours that hold secrets; its log. Ends with the run.

        Raises `StageError` where it does not start.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """One execution: where to work, what it starts from, whom to tell.

    ``again``: somebody wants it made anew (`--redo`), so nothing that earlier runs kept is taken.
    """

    setting: Setting
    path: Path
    inputs: Mapping[str, Entry]
    progress: Progress
    servers: Servers
    again: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """What a stage leaves beside its files: small facts for later stages, and one line for people.

    ``known`` gives size and SHA-256 of files that were hashed while they were written.
    """

    result: Mapping[str, object]
    summary: str
    known: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A kind of work: ``key`` is its name in a plan, ``family`` its folder in the store. The stages derive from it.

    ``needs`` are the keys of the stages that it starts from, ``packages`` those whose versions shape the result's
    bytes, where no setting decides that.
    """

    family: ClassVar[str]
    version: ClassVar[int]
    needs: ClassVar[Sequence[str]] = ()
    packages: ClassVar[Sequence[str]] = ()

    @property
    def key(self) -> str:
        """Its family's, where a plan has one of it."""
        return self.family

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The keys of the stages that it starts from, by the name that it knows them by."""
        return dict(zip(self.needs, self.needs, strict=True))

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The slice of the recipe, and of what it names, that shapes the result."""
        return {}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Versions of what shapes the result's bytes."""
        return versions(*self.packages)

    def run(self, job: Job) -> Output:
        """Do the work in ``job.path``, going on with what an earlier attempt left there."""
        raise NotImplementedError

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Whether what the entry stands for outside the store is still as it was."""
        return True


@dataclass(frozen=True)
class SideStage(Stage):
    """A stage that a plan has for each side."""

    side: Side

    @property
    def key(self) -> str:
        """One for each side."""
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
        """Whether it is named, by its key or its family."""
        return self.key in names or self.family in names


def write_json(path: Path, value: object) -> None:
    """Write JSON by a temporary name, so that a reader never meets half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
