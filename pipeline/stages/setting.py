"""The setting of a run: the recipe, its source, and everything else that stages, planner and runner are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantmint.calibration.batches import dataset_commit
from quantmint.calibration.errors import CalibrationError
from quantmint.eval.suites import Suite
from quantmint.eval.workloads import Workload
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.schema import COMMIT, Recipe
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.calibration.calibrate import Places
    from quantmint.pipeline.quantize.budget import Point
    from quantmint.pipeline.quantize.engines.stream.schedule import WriteShards
    from quantmint.pipeline.serving.environment import VllmEnvironment
    from quantmint.pipeline.serving.running.launchers import Cluster
    from quantmint.pipeline.store.remote import RemoteTier


class Commits:
    """Resolve branches of the Hub's data sets to commits, each once, so that planning and execution see the same
    commit.

    Results and failures are cached: a plan that was made while the Hub was away is not run under another fingerprint.
    """

    def __init__(self, ask: Callable[[str, str], str] = dataset_commit) -> None:
        self._ask = ask
        self._found: dict[tuple[str, str], str | CalibrationError | QuantmintError] = {}

    def dataset(self, repo: str, revision: str) -> str:
        """Return the commit of a data set's revision. Raises the Hub client's error, each time the same."""
        if COMMIT.fullmatch(revision):
            return revision
        if (key := (repo, revision)) not in self._found:
            try:
                self._found[key] = self._ask(repo, revision)
            except (CalibrationError, QuantmintError) as error:
                self._found[key] = error
        if isinstance(resolved := self._found[key], str):
            return resolved
        raise resolved


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The identity of a 16-bit model: a folder with the digest of its files, or a repository at a commit.

    ``marks`` are there where the files are not hashed: by name, what stands for those of a folder.
    """

    folder: Path | None
    digest: str
    repo: str | None = None
    marks: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content for a fingerprint, and never its place."""
        if self.repo is not None:
            return {"repo": self.repo, "commit": self.digest}
        return {"sha256": self.digest} if self.marks is None else {"files": dict(self.marks)}


class Spread(Protocol):
    """Other machines, which see our files, that do parts of a stage; no bit of a result depends on them."""

    @property
    def hardware(self) -> str:
        """Return a title of the machines."""

    @property
    def write_shards(self) -> WriteShards:
        """Return the function that writes the files of a checkpoint there."""

    def places(self, folder: Path) -> Places:
        """Return where shares of the calibration batches are measured, for a model in ``folder``."""

    def release(self) -> None:
        """End what still holds memory and GPUs there; later work starts anew."""

    def cluster(self) -> Cluster:
        """Return how a server on this machine reaches the GPUs there, for a launch over several nodes."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice behind a setting's recipe: the recipe as it was ``written``, with `scheme: auto`, and the ``point``.

    The point is None where nothing was measured yet, and the largest scheme stands in for the choice.
    """

    written: LoadedRecipe
    point: Point | None

    def to_json(self) -> dict[str, Any]:
        """Return bits of a weight, predicted cost in nats, and groups by scheme; empty without a measured choice."""
        point = self.point
        return {} if point is None else point.to_json()

    @property
    def line(self) -> str:
        """Word the choice for a person."""
        if self.point is None:
            return "auto: nothing is measured yet; what follows is of all in the largest scheme"
        counts = ", ".join(f"{count} groups in {name}" for name, count in self.point.counts.items())
        return f"auto: {self.point.spent}, {counts}; predicted cost {self.point.cost:.3g} nats"


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that a run is given.

    ``config`` is the model's config.json; ``vllm`` is None where no serving environment was found; ``device`` is
    PyTorch's name of where calibration and quantization compute; ``home`` is the folder that publish folders are
    relative to; ``remote`` is a tier of the store that several sites share (None: there is none); ``commits`` resolves
    branches of data sets; ``image`` is the container that serves, as name@sha256:DIGEST (None: none); ``spread`` are
    other machines for parts of a stage (None: this process alone); ``chosen`` is there where ``loaded`` has a choice in
    the place of `scheme: auto`.
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
