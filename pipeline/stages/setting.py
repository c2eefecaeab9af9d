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
from quantmint.pipeline.recipe.models import COMMIT
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.calibration.calibrate import Places
    from quantmint.pipeline.quantize.budget import Point
    from quantmint.pipeline.quantize.engines.stream.schedule import WriteShards
    from quantmint.pipeline.serving.environment import VllmEnvironment
    from quantmint.pipeline.serving.running.endpoint import Endpoints
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
        """Return the commit of ``revision`` (a branch, tag or commit) of a data set on the Hub.

        Raises `CalibrationError` or `QuantmintError` where the Hub cannot be asked, and the same error at every later
        call.
        """
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

    ``digest`` is the SHA-256 of a folder, or the commit of ``repo``. ``marks`` is None where the files are hashed; else
    it has, by file name, the digest or the size, times and inode that stand for the file.
    """

    folder: Path | None
    digest: str
    repo: str | None = None
    marks: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the identity for a fingerprint: repository and commit, a digest, or the marks; never a path."""
        if self.repo is not None:
            return {"repo": self.repo, "commit": self.digest}
        return {"sha256": self.digest} if self.marks is None else {"files": dict(self.marks)}


class Spread(Protocol):
    """Other machines that share our file system and do parts of a stage; no bit of a result depends on them."""

    @property
    def hardware(self) -> str:
        """Return a title of the machines."""

    @property
    def write_shards(self) -> WriteShards:
        """Return the function that writes a checkpoint's shards on these machines."""

    def places(self, folder: Path) -> Places:
        """Return the workers that measure shares of the calibration batches, for the model in ``folder``."""

    def release(self) -> None:
        """End the workers that hold memory and GPUs on these machines; later work starts new ones."""

    def cluster(self) -> Cluster:
        """Return the Ray cluster of these machines, for a server whose launch spans several nodes."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice behind a setting's recipe: the recipe as it was ``written``, with `scheme: auto`, and the ``point``.

    The point is None where nothing was measured yet, and the largest scheme stands in for the choice.
    """

    written: LoadedRecipe
    point: Point | None

    def to_json(self) -> dict[str, Any]:
        """Return mean bits of a weight, predicted cost (nats) and groups by scheme; empty without a measured choice."""
        point = self.point
        return {} if point is None else point.to_json()

    @property
    def line(self) -> str:
        """Return a line about the choice: spent budget, number of groups in each scheme, predicted cost in nats."""
        if self.point is None:
            return "auto: nothing is measured yet; what follows is of all in the largest scheme"
        counts = ", ".join(f"{count} groups in {name}" for name, count in self.point.counts.items())
        return f"auto: {self.point.spent}, {counts}; predicted cost {self.point.cost:.3g} nats"


@dataclass(frozen=True, slots=True)
class Setting:
    """The inputs of a run: recipe, store, source model, machine and serving environment.

    ``config`` is the model's config.json; ``vllm`` is None where no serving environment was found; ``device`` is
    PyTorch's name of the device that calibrates and quantizes; ``home`` is the folder that publish folders are relative
    to; ``remote`` is a store that several sites share, or None; ``commits`` resolves branches of data sets; ``image``
    is the container that serves, as name@sha256:DIGEST, or None; ``spread`` are other machines for parts of a stage
    (None: this process alone); ``endpoints`` are servers that run already, in place of those that a run starts
    (None: it starts them); ``chosen`` is set where ``loaded`` has chosen schemes in the place of `scheme: auto`.
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
    endpoints: Endpoints | None = None

    @property
    def written(self) -> Recipe:
        """The recipe as it was written, with `scheme: auto` where it chooses its schemes; defaults are filled in."""
        return (self.loaded if self.chosen is None else self.chosen.written).recipe

    @property
    def recipe(self) -> Recipe:
        """The recipe that is run, with chosen schemes in the place of `scheme: auto`; defaults are filled in."""
        return self.loaded.recipe
