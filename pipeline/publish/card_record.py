"""``quantmint/card.json``: the facts of a card that no other file of its release has.

From it, the manifest, the checkpoint's configuration, the inspection and the report anybody can render the card again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from quantmint.eval.report.model import Report
from quantmint.pipeline import __version__
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.publish.card import CalibrationText, CardFacts, CardSource, QuantizationFacts, ServingCommand
from quantmint.pipeline.publish.licences import terms
from quantmint.pipeline.publish.manifest import Manifest, first_fault, strict_object
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.sections import Licence


@dataclass(frozen=True, slots=True)
class CardRecord:
    """The content of ``quantmint/card.json``.

    ``quantmint`` and ``tools`` are the versions that rendered the card. ``base`` is the name of the 16-bit source model
    and ``metadata`` the front matter of its own card. ``licence`` is the recipe's section of that name, and ``texts``
    are the names of the licence files.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    quantmint: str
    tools: Mapping[str, str]
    base: str
    metadata: Mapping[str, Any]
    repo: str | None
    signed: Literal["key", "keyless"] | None
    licence: Mapping[str, Any]
    texts: tuple[str, ...]
    calibration: CalibrationText | None
    launches: tuple[ServingCommand, ...]


def rendering_tools() -> dict[str, str]:
    """Return the versions of the libraries that shape the text of a card."""
    return versions("jinja2", "huggingface_hub")


def encode(facts: CardFacts, licence: Licence, texts: tuple[str, ...]) -> bytes:
    """Return the bytes of ``quantmint/card.json``, equal for equal facts and versions."""
    record = CardRecord(
        quantmint=__version__,
        tools=rendering_tools(),
        base=facts.base.name,
        metadata=facts.base.metadata,
        repo=facts.repo,
        signed=facts.signed,
        licence=licence.model_dump(mode="json"),
        texts=texts,
        calibration=facts.quantization.calibration,
        launches=facts.launches,
    )
    text = json.dumps(asdict(record), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def decode(raw: bytes) -> CardRecord:
    """Parse the bytes of `encode`. Raises `UserError` for others."""
    try:
        strict_object(raw)  # no key twice
        record: CardRecord = TypeAdapter(CardRecord).validate_json(raw)
    except ValidationError as error:
        raise UserError(f"card.json: {first_fault(error)}") from None
    except ValueError as error:
        raise UserError(f"card.json: {error}") from None
    return record


def card_facts(
    record: CardRecord, manifest: Manifest, config: Mapping[str, Any], inspection: Mapping[str, Any], report: Report
) -> CardFacts:
    """Return the facts of a release's card, from its record and the other files of the release."""
    base = manifest.base
    metadata = record.metadata
    section = Recipe.model_validate(dict(manifest.recipe)).quantization
    return CardFacts(
        name=manifest.name,
        repo=record.repo,
        artefact=manifest.artefact,
        judged=manifest.created,
        base=card_source(
            record.base, base.repo, base.commit, base.sha256 if base.repo is None else None, config, metadata
        ),
        quantization=quantization_facts(section, config, inspection, record.calibration),
        terms=terms(metadata, record.texts, Licence.model_validate(dict(record.licence))),
        launches=record.launches,
        report=report,
        signed=record.signed,
    )


def card_source(
    name: str,
    repo: str | None,
    commit: str | None,
    digest: str | None,
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> CardSource:
    """Return the 16-bit source model, with its architecture from ``config``, the checkpoint's config.json."""
    architecture = str((config.get("architectures") or [""])[0])
    return CardSource(
        name, repo, commit, digest, architecture, isinstance(config.get("vision_config"), Mapping), metadata
    )


def quantization_facts(
    section: Quantization,
    config: Mapping[str, Any],
    inspection: Mapping[str, Any],
    calibration: CalibrationText | None,
) -> QuantizationFacts:
    """Return the facts of the quantization, with the modules that config.json and the ``inspection`` list."""
    counts = Counter(str(layer["scheme"]) for layer in inspection["layers"])
    declared = config.get("quantization_config") or {}
    unquantized: list[str] = declared.get("ignore") or declared.get("exclude") or []  # compressed-tensors, Quark
    return QuantizationFacts(
        section=section,
        schemes=dict(sorted(counts.items(), key=lambda item: (item[0] != section.scheme, item[0]))),
        unquantized=tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".N", name) for name in unquantized)),
        calibration=calibration,
    )
