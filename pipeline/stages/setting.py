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
