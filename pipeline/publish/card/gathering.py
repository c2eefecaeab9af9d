"""The facts of a card, from the entries of a run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from eval.report.model import DATA
from pipeline.errors import StageError
from pipeline.publish.card.base_card import base_metadata, front_matter
from pipeline.publish.card.facts import Base, Calibrated, CardFacts, Made
from pipeline.publish.card.launches import launches
from pipeline.publish.licences import TEXTS, terms
from pipeline.recipe.schema import Recipe
from pipeline.schemes import scheme
from pipeline.serving.knobs.table import NEWEST_READ
from pipeline.serving.model.facts import model_facts
from pipeline.stage import Job, Setting
from pipeline.stages.gate import checkpoint_digest
from pipeline.stages.inspect import INSPECTION
from pipeline.stages.source import model_folder
from pipeline.store.entries import Entry

if TYPE_CHECKING:
    from eval.report.model import Report

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_IGNORED = ("ignore", "exclude")  # compressed-tensors, Quark


def settings(setting: Setting) -> Mapping[str, object]:
    """What a card depends on beside the entries: where it goes, its terms, a folder's own card.

    A repository's own card belongs to its commit.
    """
    section, folder = setting.recipe.publish, setting.source.folder
    return {
        "repo": _repo(setting.recipe),
        "licence": section.licence.model_dump(mode="json"),
        "signed": _signed(setting.recipe),
        "base_card": None if folder is None else json.loads(json.dumps(front_matter(folder), default=str)),
    }


def gather(job: Job) -> CardFacts:
    """Everything that the card says.

    Of the inputs ``source``, ``quantize``, ``inspect``, ``gate`` and ``report`` are needed, ``calibrate`` where there
    is one. Raises `StageError` for a report that cannot be read.
    """
    setting, inputs, recipe = job.setting, job.inputs, job.setting.recipe
    checkpoint = model_folder(inputs["quantize"])
    try:
        report = cast("Report", json.loads(inputs["report"].file(DATA).read_text(encoding="utf-8")))
    except ValueError as error:
        raise StageError(f"{inputs['report'].path}: the report cannot be read: {error}") from error
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    metadata = base_metadata(setting.source, model_folder(inputs["source"]), warn=job.progress.warn)
    texts = [path.name for pattern in TEXTS for path in checkpoint.glob(pattern) if path.is_file()]
    repo = _repo(recipe)
    return CardFacts(
        name=recipe.name,
        repo=repo,
        artefact=checkpoint_digest(inputs["quantize"]),
        judged=inputs["gate"].record.finished,
        base=_base(setting, config, metadata),
        made=_made(recipe, inputs, config),
        terms=terms(metadata, texts, recipe.publish.licence),
        launches=launches(recipe, setting.workload, model_facts(checkpoint), repo or recipe.name, vllm=_vllm(report)),
        report=report,
        signed=_signed(recipe),
    )


def _repo(recipe: Recipe) -> str | None:
    return None if recipe.publish.hub is None else recipe.publish.hub.repo


def _signed(recipe: Recipe) -> Literal["key", "keyless"] | None:
    section = recipe.publish.sign
    return None if section is None else "keyless" if section.keyless else "key"


def _base(setting: Setting, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> Base:
    identity, folder = setting.source, Path(setting.recipe.source.folder or "")
    return Base(
        name=identity.repo or (folder.name if folder.is_absolute() else folder.as_posix()),
        repo=identity.repo,
        commit=None if identity.repo is None else identity.digest,
        digest=identity.digest if identity.repo is None else None,
        architecture=str((config.get("architectures") or [""])[0]),
        pictures=isinstance(config.get("vision_config"), Mapping),
        metadata=metadata,
    )


def _made(recipe: Recipe, inputs: Mapping[str, Entry], config: Mapping[str, Any]) -> Made:
    quantization = recipe.quantization
    inspection = json.loads(inputs["inspect"].file(INSPECTION).read_text(encoding="utf-8"))
    counted = Counter(str(layer["scheme"]) for layer in inspection["layers"])
    declared = config.get("quantization_config") or {}
    kept: list[Any] = next((declared[key] for key in _IGNORED if isinstance(declared.get(key), list)), [])
    return Made(
        scheme=quantization.scheme,
        description=scheme(quantization.scheme).description,
        weights=scheme(quantization.scheme).weight.dtype,
        kv_cache=quantization.kv_cache,
        format=quantization.format,
        engine=quantization.engine,
        algorithm=quantization.algorithm,
        schemes=dict(sorted(counted.items(), key=lambda item: (item[0] != quantization.scheme, item[0]))),
        excluded=tuple(quantization.exclude),
        kept=tuple(dict.fromkeys(_NUMBER.sub(".N", str(name)) for name in kept)),
        calibration=_calibrated(recipe, inputs),
    )


def _calibrated(recipe: Recipe, inputs: Mapping[str, Entry]) -> Calibrated | None:
    """The texts, as the entry knows them that read them: our own calibration, or a library's engine."""
    section, entry = recipe.calibration, inputs.get("calibrate") or inputs["quantize"]
    found: Any = entry.record.payload["settings"]
    found = found if "calibrate" in inputs else found.get("calibration")
    if section is None or not isinstance(found, Mapping):
        return None
    texts, tokens = found["set"], entry.record.result.get("tokens")
    return Calibrated(
        name=section.set if not section.set.endswith((".yaml", ".yml")) else Path(section.set).stem,
        samples=section.samples,
        sequence_length=section.sequence_length,
        dataset=texts.get("repo"),
        revision=texts.get("revision"),
        sha256=texts.get("file"),
        tokens=tokens if isinstance(tokens, int) else None,
    )


def _vllm(report: Report) -> str:
    """The version that was measured, where it was vLLM; else the newest that the plan's tables know."""
    for server in report["servers"]:
        found = re.search(r"\d+\.\d+(\.\d+)?", server["version"])
        if server["side"] == "candidate" and server["runtime"].startswith("vllm") and found:
            return found[0]
    return NEWEST_READ
