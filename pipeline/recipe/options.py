"""A recipe that stands in no file: its sections are the options of a command.

    >>> recipe_of({"source": {"folder": "llama"}, "quantization": {"scheme": "ptcp_fp8"}})
    Traceback (most recent call last):
    pipeline.errors.UserError: --scheme: found "ptcp_fp8", expected one of ... (did you mean "ptpc_fp8"?)

The same models and the same checks as a file's; what they find wrong is told by the option that said it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import UserError
from pipeline.recipe.faults import Fault, Place, YamlPath
from pipeline.recipe.load import LoadedRecipe, resolved_yaml
from pipeline.recipe.schema import Recipe
from pipeline.recipe.translate import faults_of
from pipeline.recipe.yaml_positions import Document

_NAMED = {("quantization", "overrides"): "--override", ("calibration", "set"): "--calibration"}
_SECTIONS = frozenset({"source", "trust_remote_code", "quantization", "calibration"})


def recipe_of(sections: Mapping[str, Any]) -> LoadedRecipe:
    """The recipe that options ask for; raises `UserError` with everything that is wrong, an option a line.

    ``sections`` are those of a recipe; values that are None were not given.
    """
    data: dict[str, Any] = {"name": "options", **{name: _given(value) for name, value in sections.items()}}
    start = Place("options", 1, 1)
    document = Document(data, {(): start}, {(): start})
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        refuse_options(faults_of(error, document))
        raise  # refuse_options() always raises here: there is at least one error
    folder = recipe.source.folder
    return LoadedRecipe(
        recipe, Path(start.file), document, resolved_yaml(recipe), None if folder is None else Path(folder).resolve()
    )


def refuse_options(faults: Iterable[Fault]) -> None:
    """Raise one `UserError` with the faults of what a command has options for; do nothing where there is none."""
    lines = [
        f"{option_of(fault.path)}: {fault.message.replace('a calibration section', '--calibration SET')}"
        for fault in faults
        if fault.path and fault.path[0] in _SECTIONS
    ]
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))


def option_of(path: YamlPath) -> str:
    """The option that says what a recipe says at a path: ``--sequence-length`` for calibration.sequence_length."""
    if path[0] == "source":
        return "SRC"
    field = path[:2]
    return _NAMED.get((str(field[0]), str(field[-1])), f"--{str(field[-1]).replace('_', '-')}")


def _given(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    return {name: value for name, value in section.items() if value is not None}
