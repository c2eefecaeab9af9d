"""The templates of a page: escaped, strict about names, in the style that all pages share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eval.report.numbers import FILTERS

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent


def environment(folder: Path = FOLDER, *between: Path) -> Environment:
    """Templates of a folder, with the filters of figures.

    `style` is the report's style sheet, followed by those of the folders `between` and by the folder's own.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= FILTERS
    sheets = [sheet / "page.css" for sheet in dict.fromkeys((FOLDER, *between, folder))]
    made.globals["style"] = Markup("".join(sheet.read_text(encoding="utf-8") for sheet in sheets))  # noqa: S704 - our own files
    return made
