"""Gather the facts of a model card from the entries of a run: checkpoint, its base's card, how to serve it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, cast

import yaml

from quantmint.calibration.batches import hub_errors
from quantmint.eval.report.model import DATA, Report
from quantmint.eval.workloads import Workload
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.card import CalibrationText, CardFacts, CardSource, ServingCommand
from quantmint.pipeline.publish.card_record import card_source, quantization_facts
from quantmint.pipeline.publish.licences import TEXTS, terms
from quantmint.pipeline.publish.release import CARD, DRAFT
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.knobs.table import NEWEST_READ
from quantmint.pipeline.serving.model.facts import ModelFacts, model_facts
from quantmint.pipeline.serving.plan import LaunchPlan, Process, processes
from quantmint.pipeline.serving.planning.layout import layout_words
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.target import ServingTarget, parse_target
from quantmint.pipeline.serving.render.invocation import command, script, servers
from quantmint.pipeline.serving.running.dialect import SGLANG, dialect_of
from quantmint.pipeline.serving.sglang import sglang_plan, shown_command
from quantmint.pipeline.stages.calibrate import set_name, texts_of
from quantmint.pipeline.stages.gate import checkpoint_digest
from quantmint.pipeline.stages.inspect import INSPECTION
from quantmint.pipeline.stages.serve import serving_request
from quantmint.pipeline.stages.setting import Setting, SourceIdentity
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.entries import Entry


def base_metadata(identity: SourceIdentity, folder: Path, *, warn: Callable[[str], None]) -> Mapping[str, Any]:
    """Return the metadata of the source's model card: of README.md in ``folder``, else of the repository at its commit.

    Empty where there is no card. ``warn`` is called with a message where the Hub could not be asked, because then
    licence and languages are unknown.
    """
    if (folder / CARD).is_file() or identity.repo is None:
        return front_matter(folder)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        path = hf_hub_download(identity.repo, CARD, revision=identity.digest)
    except RemoteEntryNotFoundError:  # a repository without a card is no fault
        return {}
    except hub_errors():
        warn(f"{identity.repo}: its card cannot be had, so its licence and languages are unknown here")
        return {}
    return front_matter(Path(path).parent)


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the YAML at the top of a folder's README.md as a mapping; empty where there is none."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


SHOWN: Final = ("mi300x", "mi355x")
"""What every card has a command for; the recipe's own target comes first."""


def launches(
    recipe: Recipe, workload: Workload, facts: ModelFacts, model: str, *, vllm: str
) -> tuple[ServingCommand, ...]:
    """Return the serving commands of a card: for the recipe's target and each of `SHOWN`, with ``model`` as the name.

    A target that cannot serve the checkpoint has the planner's reason in place of a command. ``vllm`` is the version to
    plan for.
    """
    targets = [parse_target(f"{name}:{recipe.target.gpus}") for name in dict.fromkeys((recipe.target.hardware, *SHOWN))]
    return tuple(_launch(target, recipe, workload, facts, model, vllm) for target in targets)


def _launch(
    target: ServingTarget, recipe: Recipe, workload: Workload, facts: ModelFacts, model: str, vllm: str
) -> ServingCommand:
    title, speculative = target.accelerator.title, recipe.serve.speculative
    by_another = recipe.draft is not None or (speculative is not None and speculative.model is not None)
    request = replace(
        serving_request(recipe, workload, target, model=model, facts=facts, vllm_version=vllm),
        served_model_name=model.rpartition("/")[2],
        # A reader of the card does not have another model that drafts.
        speculative=None if by_another else speculative,
    )
    if recipe.target.hardware != target.hardware:  # the recipe's knobs and packing are for its own hardware
        request = replace(request, overrides={}, servers_per_gpu=1)
    try:
        plan = plan_serving(request)
    except UserError as error:
        return ServingCommand(title=title, target=target.hardware, vllm=vllm, refusal=error.message)
    running = processes(plan, port=8000)
    return ServingCommand(
        title=title,
        target=str(target),
        command=_command(plan, running, cpu=target.accelerator.kind == "cpu"),
        layout=layout_words(plan.layout),
        servers=len(servers(running)),
        vllm=plan.vllm_version,
        image=plan.image,
        cautions=(*plan.warnings, *_left_out(recipe)),
    )


def _left_out(recipe: Recipe) -> Iterator[str]:
    """Yield a caution for each part of the recipe's own launch that a reader lacks: tuned kernels, a draft model."""
    if dialect_of(recipe.serve.runtime) is SGLANG:
        plan = sglang_plan(
            Path("FOLDER"),
            served_model_name=recipe.name,
            max_model_len=recipe.target.max_model_len,
            kv_cache_dtype=recipe.quantization.kv_cache,
            trust_remote_code=recipe.trust_remote_code,
        )
        yield f"the proof is of SGLang, not of vLLM, started by {shlex.join(shown_command(plan.argv))}"
    if recipe.serve.tunableop is not None:
        yield "the recipe serves with matrix kernels that TunableOp found, whose file is not here"
    if recipe.serve.speculative is not None and recipe.serve.speculative.model is not None:
        yield "the recipe serves with speculative decoding by another model, which is not here"
    if recipe.draft is not None and recipe.serve.speculative is not None:
        config = {"method": recipe.serve.speculative.method, "model": f"FOLDER/{DRAFT}"}
        text = json.dumps({**config, "num_speculative_tokens": recipe.serve.speculative.tokens})
        yield f"the recipe serves with the draft in `{DRAFT}/`: from a folder, add --speculative-config '{text}'"


def _command(plan: LaunchPlan, running: Sequence[Process], *, cpu: bool) -> str:
    """Return the shell commands that start one server of ``running``; for several machines the whole script.

    With ``cpu`` OMP_NUM_THREADS is the reader's `nproc`.
    """
    if plan.layout.nodes > 1:
        return script(plan, running)
    lines = [
        f"export {name}=" + ('"$(nproc)"' if cpu and name == "OMP_NUM_THREADS" else shlex.quote(value))
        for name, value in plan.env.items()
    ]
    return "\n".join([*lines, command(servers(running)[0])])


def settings(setting: Setting) -> Mapping[str, object]:
    """Return the card's inputs beside the entries, for a fingerprint: repository, licence, signing, source's card.

    The card of a source on the Hub is left out, because its commit determines it.
    """
    section, folder = setting.recipe.publish, setting.source.folder
    return {
        "repo": _repo(setting.recipe),
        "licence": section.licence.model_dump(mode="json"),
        "signed": _signed(setting.recipe),
        "base_card": None if folder is None else json.loads(json.dumps(front_matter(folder), default=str)),
    }


def gather(job: Job) -> CardFacts:
    """Return everything that the card states, from a run's entries from ``source`` to ``report``."""
    setting, inputs, recipe = job.setting, job.inputs, job.setting.recipe
    checkpoint = model_folder(inputs["quantize"])
    report = cast(Report, read_json(inputs["report"].file(DATA)))
    config = read_json(checkpoint / "config.json")
    metadata = base_metadata(setting.source, model_folder(inputs["source"]), warn=job.progress.warn)
    metadata = json.loads(json.dumps(metadata, default=str))  # as card.json has it
    inspection = read_json(inputs["inspect"].file(INSPECTION))
    repo = _repo(recipe)
    return CardFacts(
        name=recipe.name,
        repo=repo,
        artefact=checkpoint_digest(inputs["quantize"]),
        judged=inputs["gate"].record.finished,
        base=_base(setting, config, metadata),
        quantization=quantization_facts(recipe.quantization, config, inspection, _calibrated(recipe, inputs)),
        terms=terms(metadata, texts_beside(checkpoint), recipe.publish.licence),
        launches=launches(recipe, setting.workload, model_facts(checkpoint), repo or recipe.name, vllm=vllm_of(report)),
        report=report,
        signed=_signed(recipe),
    )


def _repo(recipe: Recipe) -> str | None:
    return None if recipe.publish.hub is None else recipe.publish.hub.repo


def _signed(recipe: Recipe) -> Literal["key", "keyless"] | None:
    section = recipe.publish.sign
    return None if section is None else "keyless" if section.keyless else "key"


def texts_beside(checkpoint: Path) -> tuple[str, ...]:
    """Return the names of the licence files in a checkpoint's folder, sorted."""
    return tuple(sorted({path.name for pattern in TEXTS for path in checkpoint.glob(pattern) if path.is_file()}))


def _base(setting: Setting, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> CardSource:
    identity, folder = setting.source, Path(setting.recipe.source.folder or "")
    name = identity.repo or (folder.name if folder.is_absolute() else folder.as_posix())
    commit, digest = (None, identity.digest) if identity.repo is None else (identity.digest, None)
    return card_source(name, identity.repo, commit, digest, config, metadata)


def _calibrated(recipe: Recipe, inputs: Mapping[str, Entry]) -> CalibrationText | None:
    section, texts = recipe.calibration, texts_of(inputs)
    if section is None or texts is None:
        return None
    tokens = inputs["calibrate"].record.result.get("tokens") if "calibrate" in inputs else None
    return CalibrationText(
        name=set_name(section.set),
        samples=section.samples,
        sequence_length=section.sequence_length,
        dataset=texts["repo"],
        revision=texts["revision"],
        sha256=texts["file"],
        tokens=tokens if isinstance(tokens, int) else None,
    )


def vllm_of(report: Report) -> str:
    """Return the version of vLLM that was measured, else the newest that the plan's tables know."""
    for server in report["servers"]:
        version = re.search(r"\d+\.\d+(\.\d+)?", server["version"])
        if server["side"] == "candidate" and server["runtime"].startswith("vllm") and version:
            return version[0]
    return NEWEST_READ
