"""Whether the tensors are what config.json says of them, and config.json what recipe.yaml asks for."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from pipeline.base.canonical import difference
from pipeline.base.errors import UserError
from pipeline.publish.release import RECIPE
from pipeline.publish.verify.check import Check, fails, judged, not_checked
from pipeline.publish.verify.subject import Subject, UnknownModelError
from pipeline.quantize.formats.known import layout_of
from pipeline.quantize.inspection.findings import Finding
from pipeline.quantize.inspection.findings import check_structure as structure_findings
from pipeline.quantize.inspection.inspect import inspect_checkpoint
from pipeline.quantize.model.select import select
from pipeline.recipe.json_schema import faults_of
from pipeline.recipe.schema import Recipe
from pipeline.recipe.yaml_positions import parse

_SHOWN = 5


def check_recipe(subject: Subject) -> Check:
    """Read the recipe as a run would, and hold it against the manifest and the configuration."""
    try:
        document = parse(subject.text(RECIPE), RECIPE)
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        return fails("recipe", *(str(fault) for fault in faults_of(error, document)))
    except UserError as error:
        return fails("recipe", error.message)
    faults = []
    if subject.manifest is not None:
        faults += [
            f"{RECIPE}: {change.path[2:]} is {change.new!r}, quantmint.json says {change.old!r}"
            for change in difference(subject.manifest.recipe, document.data)
        ]
    try:
        faults += _against_config(subject, recipe)
    except UnknownModelError as error:
        if not faults:
            return not_checked("recipe", f"what it asks for was not held against config.json: {error.message}")
    said = recipe.quantization
    return judged("recipe", faults, f"{said.scheme}, KV cache {said.kv_cache}, {said.format}: what config.json says")


def _against_config(subject: Subject, recipe: Recipe) -> list[str]:
    """Where the layout, the schemes of the modules or the KV cache are not what was asked for."""
    try:
        checkpoint, structure = subject.model
        form = layout_of(checkpoint.config)
        modules = [*structure.linear, *structure.kept]
        claims = form.claims(checkpoint.config["quantization_config"], modules)
        # What the wishes are applied to is the model that was quantized, which has the same modules.
        choice = select(replace(structure, quantized_by=None), recipe.quantization)
    except UnknownModelError:
        raise
    except UserError as error:
        return [error.message]
    faults = []
    if form.name != recipe.quantization.format:
        faults.append(f"{RECIPE} asks for the format {recipe.quantization.format}, config.json says {form.name}")
    if claims.kv_cache != choice.kv_cache:
        caches = ("an FP8 KV cache", "a 16-bit KV cache")
        asked, found = caches if choice.kv_cache else caches[::-1]
        faults.append(f"{RECIPE} asks for {asked}, config.json says {found}")
    other = [
        f"{RECIPE} gives {module} {choice.schemes.get(module) or '16 bit'}, config.json says "
        f"{claims.schemes.get(module) or claims.unknown.get(module) or '16 bit'}"
        for module in structure.linear
        if choice.schemes.get(module) != claims.schemes.get(module)
    ]
    more = [f"{len(other) - _SHOWN} more modules have another scheme"] if len(other) > _SHOWN else []
    return faults + other[:_SHOWN] + more


def check_structure(subject: Subject) -> Check:
    """Inspect the checkpoint as `quantmint inspect` does; where only headers were fetched, those."""
    try:
        checkpoint, structure = subject.model
        form = layout_of(checkpoint.config)
        if subject.vouched:
            modules = [*structure.linear, *structure.kept]
            claims = form.claims(checkpoint.config["quantization_config"], modules)
            found = [_told(finding) for finding in structure_findings(checkpoint, structure, claims)]
            if found:
                return fails("structure", *found)
            reason = f"the headers of {len(checkpoint.tensors)} tensors are right; their numbers were not fetched"
            return not_checked("structure", reason, "without --remote they are fetched and checked")
        with subject.progress.bar(checkpoint.nbytes, "B") as advance:
            inspection = inspect_checkpoint(checkpoint, structure, advance=advance)
    except UnknownModelError as error:
        return not_checked("structure", error.message)
    except UserError as error:
        return fails("structure", error.message)
    return judged("structure", list(map(_told, inspection.findings)), f"{form.name}: {inspection.summary()}")


def _told(finding: Finding) -> str:
    return f"{finding.rule}: {finding.where}: {finding.message}"
