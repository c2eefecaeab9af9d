"""Load a recipe by its name or path: complete and valid, or one message with every fault.

    >>> loaded = load_recipe("tiny-ptpc-fp8kv")
    >>> loaded.recipe.quantization.scheme
    'ptpc_fp8'

`extends` is resolved here: mappings merge deeply, lists and scalars replace. A value keeps the place where it is
written, so that a fault in a shared file is reported there. `name` and `description` describe one file, so they are
never inherited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import ValidationError

from quantmint.eval.records import is_path
from quantmint.pipeline.base.errors import RecipeError, UserError, did_you_mean, shown_path
from quantmint.pipeline.recipe.faults import OPTIONS, Fault, Place, YamlPath, refuse, shown
from quantmint.pipeline.recipe.json_schema import faults_of, place_of
from quantmint.pipeline.recipe.schema import Quantization, Recipe
from quantmint.pipeline.recipe.yaml_positions import Document, Dumper, read

_OWN = ("name", "description", "extends")
_OTHER = re.compile(r"^(text|messages|turns|tasks|cells)\s*:", re.MULTILINE)
"""What no recipe says, and each calibration set, suite or workload does that lies beside them."""
_DEFINITIONS = (("calibration", "set"), ("target", "workload"), ("evaluation", "suite"))
"""A name of ours, or a path that is relative to the file that says it."""
_PLACES = (("source", "folder"), ("calibration", "set"), ("target", "workload"), ("serve", "tunableop"))
PROVEN_SUITE = "quantmint/suite"
"""Folder of a release that holds the recipe's own suite, with its tasks and their data."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, with its file.

    `path` is the file that was named, `positions` the place of every value that is written in it or in what it extends.
    `source_folder` is absolute, relative paths being resolved beside the file that states them; None where the source
    is a repository.
    """

    recipe: Recipe
    path: Path
    positions: Document
    source_folder: Path | None

    @property
    def text_resolved(self) -> str:
        """Return the recipe as YAML with everything inherited and every default written out."""
        return _yaml(self.recipe.model_dump(mode="json"))

    @cached_property
    def text_proven(self) -> str:
        """Return `text_resolved` without places, destinations, tracking and schedules, which shape no result.

        It is published. A file beside the recipe keeps its relative path; of a file elsewhere only the name is kept,
        because its path tells much of a machine and its user and nothing of the content.
        """
        data = self.recipe.model_dump(mode="json", exclude={"tracking", "publish", "refresh"})
        for section, name in _PLACES:
            if data[section] is not None and data[section][name] is not None:
                data[section][name] = without_place(data[section][name])
        if is_path(suite := data["evaluation"]["suite"]):
            data["evaluation"]["suite"] = f"{PROVEN_SUITE}/{PurePosixPath(suite).name}"
        return _yaml(data)

    @property
    def source_name(self) -> str:
        """Return the source's public name: its repository, or its folder without the path to it."""
        source = self.recipe.source
        return source.repo or without_place(str(source.folder))

    @property
    def signing_key(self) -> Path | None:
        """Return the absolute path of the private key, resolved beside the file that names it; None without one."""
        signing = self.recipe.publish.sign
        if signing is None or signing.key is None:
            return None
        return _beside(("publish", "sign", "key"), signing.key, self.positions)

    @property
    def tunableop(self) -> Path | None:
        """Return the absolute path of TunableOp's CSV, resolved beside the file that names it; None without one."""
        file = self.recipe.serve.tunableop
        return None if file is None else _beside(("serve", "tunableop"), file, self.positions)

    def place(self, *path: str | int, key: bool = False) -> Place:
        """Return the place of a value; of a default, that of the mapping that could hold it."""
        return place_of(path, self.positions, key=key)

    def fault(self, path: YamlPath, message: str) -> Fault:
        """Return a fault at the place of a value."""
        return Fault(self.place(*path), path, message)


def load_recipe(name_or_path: str | Path) -> LoadedRecipe:
    """Load a recipe by its name (among `recipes/` here, then the shipped ones) or by its path.

    Raises `UserError` for a name that does not exist and `RecipeError` with every fault of the file.
    """
    path = find(name_or_path)
    document = _merged(path, ())
    return validated(document, path, _name_faults(document, path))


def recipe_of(sections: Mapping[str, Any]) -> LoadedRecipe:
    """The recipe that stands in no file: its sections are the options of a command; what is None was not given.

    The same models and checks as a file's; what they find wrong is told by the option that said it. Raises
    `RecipeError` with everything that is wrong, an option a line.
    """
    data: dict[str, Any] = {"name": "options"}
    for name, section in sections.items():
        given = isinstance(section, Mapping)
        data[name] = {key: value for key, value in section.items() if value is not None} if given else section
    document = Document(data, {(): OPTIONS}, {(): OPTIONS})
    return validated(document, Path(OPTIONS.file))


def validated(document: Document, path: Path, faults: Sequence[Fault] = ()) -> LoadedRecipe:
    """Return the recipe of a document. Raises `RecipeError` with the faults of its fields, and ``faults``."""
    data = dict(document.data)
    for section, name in _DEFINITIONS:
        found = data[section].get(name) if isinstance(data.get(section), dict) else None
        if isinstance(found, str) and is_path(found):
            data[section] = {**data[section], name: str(_beside((section, name), found, document))}
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        refuse([*faults_of(error, document), *faults])
        raise  # refuse() always raises here: there is at least one error
    refuse(faults)
    folder = recipe.source.folder
    source = None if folder is None else _beside(("source", "folder"), folder, document)
    return LoadedRecipe(recipe, path, document, source)


def _beside(at: YamlPath, relative: str, document: Document) -> Path:
    """Return a path that a file names, which may be an extended one, resolved beside that file."""
    return (Path(place_of(at, document).file).absolute().parent / relative).resolve()


def choice_yaml(quantization: Quantization) -> str:
    """Return the scheme of each module as a block that stands in a recipe."""
    section = quantization.model_dump(mode="json", include={"scheme", "overrides"})
    return _yaml({"quantization": section})


def sections_yaml(sections: Mapping[str, Any]) -> str:
    """Return sections as a block that stands in a recipe."""
    return _yaml(sections)


def _yaml(data: Mapping[str, Any]) -> str:
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def without_place(path: str) -> str:
    """A path below the recipe's folder as it is, the last part of one that leads elsewhere."""
    parts = PurePosixPath(path)
    return parts.name if parts.is_absolute() or path.startswith("~") or ".." in parts.parts else path


def recipe_names() -> tuple[str, ...]:
    """Names that `load_recipe` knows, sorted; files that start with an underscore are only there to be extended."""
    own = ((name, path) for name, path in sorted(_known().items()) if not name.startswith("_"))
    return tuple(name for name, path in own if not _OTHER.search(path.read_text("utf-8", errors="replace")))


def find(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """The file of a recipe; `UserError` with the nearest names where there is none.

    ``beside`` is the folder of a file that extends it, which may be one that is only there for that.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or is_path(text) or "/" in text:
        path = (beside or Path()) / text
        if path.is_file():
            return path
        near = did_you_mean(path.name, [item.name for item in path.parent.glob("*.y*ml")])
        raise UserError(f"found no recipe file {shown_path(path)}{near}, expected a path to one or a recipe's name")
    known = _known()
    names = recipe_names() if beside is None else tuple(known)
    if text in names:
        return known[text]
    raise UserError(f"found no recipe {shown(text)}{did_you_mean(text, names)}", hint=f"There are: {', '.join(names)}")


def _known() -> dict[str, Path]:
    """Files by name; a recipe of the working directory goes before a shipped one."""
    shipped = Path(str(resources.files("quantmint.recipes")))
    return {path.stem: path for folder in (shipped, Path("recipes")) for path in sorted(folder.glob("*.yaml"))}


def _merged(path: Path, below: tuple[Path, ...]) -> Document:
    """The file with what it extends beneath it; `below` are the files that led here."""
    document = read(path)
    if "extends" not in document.data:
        return document
    wanted = document.data["extends"]
    place = place_of(("extends",), document)
    if not isinstance(wanted, str) or not wanted:
        raise _refused(place, f"found {shown(wanted)}, expected the path of a YAML file or a recipe's name")
    try:
        base = find(wanted, path.parent)
    except UserError as error:
        raise _refused(place, error.message) from None
    chain = (*below, path.resolve())
    if base.resolve() in chain:
        names = " -> ".join(shown_path(item) for item in (*chain, base.resolve()))
        raise _refused(place, f"found a circle ({names}), expected a file that does not lead back here")
    return _overlay(_merged(base, chain), document)


def _refused(place: Place, message: str) -> RecipeError:
    return RecipeError(str(Fault(place, ("extends",), message)))


def _overlay(base: Document, top: Document) -> Document:
    """`top` over `base`: places follow the values that remain, and a mapping's place is that of the top file."""
    data, gone = _merge({k: v for k, v in base.data.items() if k not in _OWN}, top.data, ())
    gone.update((key,) for key in _OWN)
    data.pop("extends")

    def joined(old: Mapping[YamlPath, Place], new: Mapping[YamlPath, Place]) -> dict[YamlPath, Place]:
        kept = {path: place for path, place in old.items() if not any(path[: len(root)] == root for root in gone)}
        return {**kept, **new}

    return Document(data, joined(base.keys, top.keys), joined(base.values, top.values))


def _merge(base: dict[str, Any], top: dict[str, Any], at: YamlPath) -> tuple[dict[str, Any], set[YamlPath]]:
    """The merged mapping, with the paths whose value in `base` was replaced as a whole."""
    merged, gone = dict(base), set[YamlPath]()
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key], replaced = _merge(old, value, (*at, key))
            gone |= replaced
        else:
            merged[key] = value
            gone.add((*at, key))
    return merged, gone


def _name_faults(document: Document, path: Path) -> list[Fault]:
    name = document.data.get("name")
    if not isinstance(name, str) or name == path.stem:
        return []
    message = f'found "{name}", expected the name of its file, "{path.stem}"'
    return [Fault(place_of(("name",), document), ("name",), message)]
