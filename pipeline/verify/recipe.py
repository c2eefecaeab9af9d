"""Whether recipe.yaml is the recipe that this checkpoint was made by, as far as config.json can tell."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from pipeline.canonical import difference
from pipeline.errors import UserError
from pipeline.formats.layout import layout_of
from pipeline.model.select import select
from pipeline.publish.release import RECIPE
from pipeline.recipe.schema import Recipe
from pipeline.recipe.translate import faults_of
from pipeline.recipe.yaml_positions import parse
from pipeline.verify.check import Check, fails, judged, not_checked
from pipeline.verify.model import UnknownModelError
from pipeline.verify.subject import Subject

NAME = "recipe"
_SHOWN = 5


def check(subject: Subject) -> Check:
    """Read the recipe as a run would, and hold it against the manifest and the configuration."""
    try:
        document = parse(subject.text(RECIPE), RECIPE)
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        return fails(NAME, *(str(fault) for fault in faults_of(error, document)))
    except UserError as error:
        return fails(NAME, error.message)
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
            return not_checked(NAME, f"what it asks for was not held against config.json: {error.message}")
    said = recipe.quantization
    return judged(NAME, faults, f"{said.scheme}, KV cache {said.kv_cache}, {said.format}: what config.json says")


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
