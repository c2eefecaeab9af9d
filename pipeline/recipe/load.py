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
from quantmint.pipeline.recipe.faults import OPTIONS, Fault, Position, YamlPath, refuse, shown
from quantmint.pipeline.recipe.json_schema import faults_of, place_of
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.yaml_positions import Dumper, YamlDocument, read

_OWN = ("name", "description", "extends")
_OTHER = re.compile(r"^(text|messages|turns|tasks|cells)\s*:", re.MULTILINE)
"""Keys of calibration sets, suites and workloads, which may lie in the same folder; no recipe has them."""
_DEFINITIONS = (("calibration", "set"), ("target", "workload"), ("evaluation", "suite"))
"""Fields with a shipped name, or a path relative to the file that states it."""
_PLACES = (
    ("source", "folder"),
    ("calibration", "set"),
    ("target", "workload"),
    ("serve", "tunableop"),
    ("draft", "folder"),
)
_ENDPOINTS_WITH_FILES = ("tools", "reasoning")
PROVEN_SUITE = "quantmint/suite"
"""Folder of a release that holds the recipe's own suite, with its tasks and their data."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, with its file.

    `path` is the file that was named, `positions` the place of every value that is written in it or in a file that it
    extends. `source_folder` is the source model's folder as an absolute path, None if the source is a repository; a
    relative path is resolved beside the file that states it.
    """

    recipe: Recipe
    path: Path
    positions: YamlDocument
    source_folder: Path | None

    @property
    def text_resolved(self) -> str:
        """Return the recipe as YAML with everything inherited and every default written out."""
        return _yaml(self.recipe.model_dump(mode="json"))

    @cached_property
    def text_proven(self) -> str:
        """Return `text_resolved` as it is published, without what shapes no result.

        Destinations, tracking and schedules are left out. A file beside the recipe keeps its relative path; of a file
        elsewhere only the name is kept, because its path tells much of a machine and its user and nothing of the
        content.
        """
        data = self.recipe.model_dump(mode="json", exclude={"tracking", "publish", "refresh"})
        for section, name in _PLACES:
            if data.get(section) is not None and data[section][name] is not None:
                data[section][name] = without_place(data[section][name])
        for name in _ENDPOINTS_WITH_FILES:
            section = data["evaluation"].get(name)
            if section is not None and section["file"] is not None:
                section["file"] = without_place(section["file"])
        if (section := data["evaluation"].get("long")) is not None and section["set"] is not None:
            section["set"] = without_place(section["set"])
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
        return _resolved(("publish", "sign", "key"), signing.key, self.positions)

    @property
    def tunableop(self) -> Path | None:
        """Return the absolute path of TunableOp's CSV, resolved beside the file that names it; None without one."""
        file = self.recipe.serve.tunableop
        return None if file is None else _resolved(("serve", "tunableop"), file, self.positions)

    @property
    def draft_folder(self) -> Path | None:
        """Return the absolute path of the draft in 16 bit, resolved beside the file that names it; None without one."""
        draft = self.recipe.draft
        return None if draft is None else _resolved(("draft", "folder"), draft.folder, self.positions)

    @property
    def long_set(self) -> str | None:
        """Return the set that `evaluation.long` names, a path as an absolute one; None where it names none."""
        section = self.recipe.evaluation.long
        if section is None or section.set is None or not is_path(section.set):
            return None if section is None else section.set
        return str(_resolved(("evaluation", "long", "set"), section.set, self.positions))

    def items_file(self, endpoint: str) -> Path | None:
        """Return the absolute path of the items of an endpoint of `evaluation`, resolved beside the file that names it.

        None for generated items.
        """
        section = getattr(self.recipe.evaluation, endpoint)
        file = None if section is None else section.file
        return None if file is None else _resolved(("evaluation", endpoint, "file"), file, self.positions)

    def place(self, *path: str | int, key: bool = False) -> Position:
        """Return the place of a value, or of its ``key``; of a default, that of the mapping that could hold it."""
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
    """Return a recipe made of a command's options, given by section and key; options that are None were not given.

    The same models and checks as for a file apply, and errors name the option. Raises `RecipeError` with every fault,
    one per line.
    """
    data: dict[str, Any] = {"name": "options"}
    for name, section in sections.items():
        is_mapping = isinstance(section, Mapping)
        data[name] = {key: value for key, value in section.items() if value is not None} if is_mapping else section
    document = YamlDocument(data, {(): OPTIONS}, {(): OPTIONS})
    return validated(document, Path(OPTIONS.file))


def validated(document: YamlDocument, path: Path, faults: Sequence[Fault] = ()) -> LoadedRecipe:
    """Return the recipe of a parsed document, which was read from ``path``.

    Raises `RecipeError` with the faults of its fields, and with ``faults``, which were found before.
    """
    data = dict(document.data)
    for section, name in _DEFINITIONS:
        name_or_path = data[section].get(name) if isinstance(data.get(section), dict) else None
        if isinstance(name_or_path, str) and is_path(name_or_path):
            data[section] = {**data[section], name: str(_resolved((section, name), name_or_path, document))}
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        refuse([*faults_of(error, document), *faults])
        raise  # refuse() always raises here: there is at least one error
    refuse(faults)
    folder = recipe.source.folder
    source = None if folder is None else _resolved(("source", "folder"), folder, document)
    return LoadedRecipe(recipe, path, document, source)


def _resolved(at: YamlPath, relative: str, document: YamlDocument) -> Path:
    """Return the path ``relative``, the value at ``at`` in a recipe, resolved beside the file that states it.

    That file may be one which the recipe extends.
    """
    return (Path(place_of(at, document).file).absolute().parent / relative).resolve()


def choice_yaml(quantization: Quantization) -> str:
    """Return the scheme and overrides as a YAML block for a recipe."""
    section = quantization.model_dump(mode="json", include={"scheme", "overrides"})
    return _yaml({"quantization": section})


def sections_yaml(sections: Mapping[str, Any]) -> str:
    """Return sections as a YAML block for a recipe."""
    return _yaml(sections)


def _yaml(data: Mapping[str, Any]) -> str:
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def without_place(path: str) -> str:
    """Return a path below the recipe's folder unchanged, and only the last part of any other path."""
    parts = PurePosixPath(path)
    return parts.name if parts.is_absolute() or path.startswith("~") or ".." in parts.parts else path


def recipe_names() -> tuple[str, ...]:
    """Return the names that `load_recipe` accepts, sorted; files that start with an underscore only serve as bases."""
    files = ((name, path) for name, path in sorted(_recipe_files().items()) if not name.startswith("_"))
    return tuple(name for name, path in files if not _OTHER.search(path.read_text("utf-8", errors="replace")))


def find(name_or_path: str | Path, folder: Path | None = None) -> Path:
    """Return the file of a recipe. Raises `UserError` with the nearest names where it does not exist.

    ``folder`` is the folder of the file that extends it (None: no file does); files that start with an underscore are
    accepted only then.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or is_path(text) or "/" in text:
        path = (folder or Path()) / text
        if path.is_file():
            return path
        near = did_you_mean(path.name, [item.name for item in path.parent.glob("*.y*ml")])
        raise UserError(f"found no recipe file {shown_path(path)}{near}, expected a path to one or a recipe's name")
    files = _recipe_files()
    names = recipe_names() if folder is None else tuple(files)
    if text in names:
        return files[text]
    raise UserError(f"found no recipe {shown(text)}{did_you_mean(text, names)}", hint=f"There are: {', '.join(names)}")


def _recipe_files() -> dict[str, Path]:
    """Return the recipe files by name; one in the working directory's `recipes/` goes before a shipped one."""
    shipped = Path(str(resources.files("quantmint.recipes")))
    return {path.stem: path for folder in (shipped, Path("recipes")) for path in sorted(folder.glob("*.yaml"))}


def shipped_for(model: str) -> tuple[str, ...]:
    """Return the names of shipped recipes, sorted, whose source has this name without its organisation, in any case."""
    shipped = Path(str(resources.files("quantmint.recipes")))
    sources = {path.stem: load_recipe(str(path)).recipe.source for path in shipped.glob("[!_]*.yaml")}
    repos = {name: source.repo.rpartition("/")[2] for name, source in sources.items() if source.repo is not None}
    return tuple(sorted(name for name, repo in repos.items() if repo.lower() == model.lower()))


def _merged(path: Path, below: tuple[Path, ...]) -> YamlDocument:
    """Return the file merged over the one that it extends; `below` are the files that led to this one."""
    document = read(path)
    if "extends" not in document.data:
        return document
    extended = document.data["extends"]
    place = place_of(("extends",), document)
    if not isinstance(extended, str) or not extended:
        raise _refused(place, f"found {shown(extended)}, expected the path of a YAML file or a recipe's name")
    try:
        base = find(extended, path.parent)
    except UserError as error:
        raise _refused(place, error.message) from None
    chain = (*below, path.resolve())
    if base.resolve() in chain:
        names = " -> ".join(shown_path(item) for item in (*chain, base.resolve()))
        raise _refused(place, f"found a circle ({names}), expected a file that does not lead back here")
    return _overlay(_merged(base, chain), document)


def _refused(place: Position, message: str) -> RecipeError:
    return RecipeError(str(Fault(place, ("extends",), message)))


def _overlay(base: YamlDocument, top: YamlDocument) -> YamlDocument:
    """Return `top` merged over `base`: every value keeps its position, and a mapping gets that of the top file."""
    data, replaced = _merge({k: v for k, v in base.data.items() if k not in _OWN}, top.data, ())
    replaced.update((key,) for key in _OWN)
    data.pop("extends")

    def joined(old: Mapping[YamlPath, Position], new: Mapping[YamlPath, Position]) -> dict[YamlPath, Position]:
        inherited = {
            path: place for path, place in old.items() if not any(path[: len(root)] == root for root in replaced)
        }
        return {**inherited, **new}

    return YamlDocument(data, joined(base.keys, top.keys), joined(base.values, top.values))


def _merge(base: dict[str, Any], top: dict[str, Any], at: YamlPath) -> tuple[dict[str, Any], set[YamlPath]]:
    """Return `top` merged over `base`, and the paths whose value in `base` was replaced as a whole.

    ``at`` is the path of both mappings in the recipe.
    """
    merged, replaced = dict(base), set[YamlPath]()
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key], below = _merge(old, value, (*at, key))
            replaced |= below
        else:
            merged[key] = value
            replaced.add((*at, key))
    return merged, replaced


def _name_faults(document: YamlDocument, path: Path) -> list[Fault]:
    name = document.data.get("name")
    if not isinstance(name, str) or name == path.stem:
        return []
    message = f'found "{name}", expected the name of its file, "{path.stem}"'
    return [Fault(place_of(("name",), document), ("name",), message)]
