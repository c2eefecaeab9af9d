"""From what a person typed, or a recipe says, to the places that releases are published to.

    open_destination("published/llama70b-fp8kv")           a folder
    open_destination("s3://bucket/models/llama70b-fp8kv")  a bucket
    open_destination("my-org/Llama-3.3-70B-FP8-KV")        a repository of the Hub, also as hf://my-org/...
    elsewhere(recipe.publish, {"hub": "my-org/name"})  a recipe's publish section with the places of a command line

Nothing is asked of a place before its methods are called, and only what speaks to that kind of place is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from quantmint.pipeline.base.argument import HUB_SCHEME, classify
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.publish.destination import Destination
from quantmint.pipeline.recipe.destinations import KINDS, RELEASES, DestinationSection
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.sections import Publish

EXPECTED: Final = f"{', '.join(kind.typed_form for kind in KINDS[:-1])} or {KINDS[-1].typed_form}"
"""What a command takes for a place, in a message."""


def open_destination(text: str) -> Destination:
    """The place that a person names; raises `UserError` for what is none.

    A published folder that is there goes before a repository of the same name; ``hf://org/name`` always means the Hub.
    """
    for kind in KINDS:
        if (parsed := kind.parse(text)) is not None:
            destination, name = parsed
            return _class_of(destination).of(destination, name, Path(), typed=True)
    releases = Path(text).absolute().parent / RELEASES
    known = releases.iterdir() if releases.is_dir() else ()
    near = did_you_mean(text, [str(Path(text).with_name(one.name)) for one in known])
    raise UserError(
        f"{text}: nothing was published there{near}; expected {EXPECTED}",
        hint=f"{HUB_SCHEME}{text} is the repository of that name." if classify(text).kind == "repository" else None,
    )


def published_folder(recipe: Recipe, home: Path) -> Path | None:
    """Where readers find a recipe's checkpoint here, relative to ``home``; None where it publishes to no folder."""
    folder = recipe.publish.folder
    return None if folder is None else (home / folder).resolve() / recipe.name


def recipe_destinations(recipe: Recipe, home: Path) -> tuple[Destination, ...]:
    """The places of a recipe, in the order in which they are published to: what is nearest comes first."""
    return tuple(_class_of(each).of(each, recipe.name, home) for each in recipe.publish.destinations())


def public_names(recipe: Recipe) -> tuple[str, ...]:
    """What it is called where others than the one who runs this read it, what is farthest first."""
    names = (each.public_name(recipe.name) for each in reversed(recipe.publish.destinations()))
    return tuple(name for name in names if name is not None)


def serving_name(recipe: Recipe) -> str:
    """What a reader gives vLLM to serve what was published, by the farthest place: a repository before a folder.

    It is printed in what goes out.
    """
    return recipe.publish.destinations()[-1].served_name(recipe.name)


def override_destinations(section: Publish, given: Mapping[str, str | None], *, to: str | None = None) -> Publish:
    """The section with the places of a command line, by key; the same where nothing is given.

    They replace all of the section's; what it says of a place of the same kind goes for the one that takes its part.
    Raises `UserError` for what is none.
    """
    old = section.model_dump()
    changes: dict[str, Any] = {} if to is None else {"to": to}
    if any(value is not None for value in given.values()):
        for kind in KINDS:
            value = given.get(kind.key)
            changes[kind.key] = value if value is None or kind.bare else {**(old[kind.key] or {}), kind.naming: value}
    try:
        return Publish.model_validate({**old, **changes})
    except ValidationError as error:
        fault = error.errors()[0]
        kind = next(kind for kind in KINDS if kind.key == fault["loc"][0])
        raise UserError(f"--{kind.key}: found {fault['input']!r}, expected {kind.form}") from None


def _class_of(destination: DestinationSection) -> type[Destination]:
    module, _, name = destination.client.rpartition(".")
    place: type[Destination] = getattr(import_module(module), name)
    return place
