"""Everything that a card says, as plain values: the same facts give the same text, on every machine and day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eval.report.model import Report
from pipeline.publish.licences import Terms
from pipeline.recipe.schema import Quantization


@dataclass(frozen=True, slots=True)
class Base:
    """The 16-bit model: of the Hub's ``repo`` at a ``commit``, or a folder with a ``digest``; it may read ``pictures``.

    ``metadata`` is the front matter of its own card, as it stands there.
    """

    name: str
    repo: str | None = None
    commit: str | None = None
    digest: str | None = None
    architecture: str = ""
    pictures: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The texts that ranges were measured on: a dataset of the Hub at a revision, or a file by its SHA-256."""

    name: str
    samples: int
    sequence_length: int
    dataset: str | None = None
    revision: str | None = None
    sha256: str | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """How the checkpoint was made: as the recipe's ``section`` asks.

    ``schemes`` counts quantized modules by scheme, the recipe's own first. ``kept`` are all modules that stay in 16
    bit, as the checkpoint declares them, with N for the number of a layer or an expert.
    """

    section: Quantization
    schemes: Mapping[str, int] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    calibration: Calibrated | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kind of hardware serves it: a command, or a ``refusal``. ``servers`` such commands fill the target."""

    title: str
    target: str
    command: str = ""
    layout: str = ""
    servers: int = 1
    vllm: str = ""
    image: str | None = None
    cautions: tuple[str, ...] = ()
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts of one checkpoint.

    ``name`` is the recipe's, ``repo`` the Hub's name of where it goes (None: it goes elsewhere). ``artefact`` is the
    digest of the checkpoint that the gate judged, ``judged`` the ISO 8601 time at which it did. ``report`` is the
    content of report.json. ``signed`` says how it is signed: by a key, by an identity (keyless), or not.
    """

    name: str
    repo: str | None
    artefact: str
    judged: str
    base: Base
    made: Made
    terms: Terms
    launches: tuple[Launch, ...]
    report: Report
    signed: Literal["key", "keyless"] | None = None

    @property
    def title(self) -> str:
        """What the checkpoint is called: by its repository, else by its recipe."""
        return self.repo.rpartition("/")[2] if self.repo else self.name
