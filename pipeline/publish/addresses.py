"""Open destinations from the address that a person typed, or from a recipe.

    open_destination("published/llama70b-fp8kv")           a folder
    open_destination("s3://bucket/models/llama70b-fp8kv")  a bucket
    open_destination("my-org/Llama-3.3-70B-FP8-KV")        a repository of the Hub, also as hf://my-org/...
    elsewhere(recipe.publish, {"hub": "my-org/name"})  a section with the options of a command

Opening sends no request, and imports only the module of that kind of destination.
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
"""The forms of an address, for messages."""


def open_destination(text: str) -> Destination:
    """Return the destination at an address; raise `UserError` for any other text.

    An existing published folder is preferred to a repository of the same name; ``hf://org/name`` is always the Hub's.
    """
    for kind in KINDS:
        if (parsed := kind.parse(text)) is not None:
            destination, name = parsed
            return _class_of(destination).of(destination, name, Path(), typed=True)
    if text and (link := Path(text)).is_symlink() and not link.exists():
        raise UserError(
            f"{text}: a link to {link.readlink()}, which is not there: a published folder is a link to its release",
            hint=f"Copy what it leads to: cp -rL published/NAME {text}",
        )
    releases = Path(text).absolute().parent / RELEASES
    folders = releases.iterdir() if releases.is_dir() else ()
    near = did_you_mean(text, [str(Path(text).with_name(folder.name)) for folder in folders])
    raise UserError(
        f"{text}: nothing was published there{near}; expected {EXPECTED}",
        hint=f"{HUB_SCHEME}{text} is the repository of that name." if classify(text).kind == "repository" else None,
    )


def published_folder(recipe: Recipe, home: Path) -> Path | None:
    """Return the absolute path of a recipe's published checkpoint; None if it publishes to no folder.

    A relative folder of the recipe is resolved against ``home``.
    """
    folder = recipe.publish.folder
    return None if folder is None else (home / folder).resolve() / recipe.name


def recipe_destinations(recipe: Recipe, home: Path) -> tuple[Destination, ...]:
    """Return the destinations of a recipe in the order of publication, the nearest first.

    Relative folders are resolved against ``home``.
    """
    return tuple(_class_of(section).of(section, recipe.name, home) for section in recipe.publish.destinations())


def public_names(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of a recipe's releases at destinations that others read, the farthest first."""
    names = (section.public_name(recipe.name) for section in reversed(recipe.publish.destinations()))
    return tuple(name for name in names if name is not None)


def serving_name(recipe: Recipe) -> str:
    """Return the model name for `vllm serve` at the farthest destination: a repository before a folder.

    The card and the report print it.
    """
    return recipe.publish.destinations()[-1].served_name(recipe.name)


def override_destinations(section: Publish, options: Mapping[str, str | None], *, to: str | None = None) -> Publish:
    """Return the publish section with the destinations of a command's options; without any, its own stay.

    ``options`` maps the key of a destination's kind ("folder", "storage", "hub") to its place, None for an option that
    was not given. Given ones replace all destinations; one of the same kind keeps the section's other settings. ``to``
    replaces the setting of that name (None: keep it). Raises `UserError` for an invalid option.
    """
    old = section.model_dump()
    changes: dict[str, Any] = {} if to is None else {"to": to}
    if any(value is not None for value in options.values()):
        for kind in KINDS:
            value = options.get(kind.key)
            changes[kind.key] = value if value is None or kind.bare else {**(old[kind.key] or {}), kind.naming: value}
    try:
        return Publish.model_validate({**old, **changes})
    except ValidationError as error:
        fault = error.errors()[0]
        kind = next(kind for kind in KINDS if kind.key == fault["loc"][0])
        raise UserError(f"--{kind.key}: found {fault['input']!r}, expected {kind.form}") from None


def _class_of(destination: DestinationSection) -> type[Destination]:
    module, _, name = destination.client.rpartition(".")
    client: type[Destination] = getattr(import_module(module), name)
    return client
