"""What a person names on a command line, told apart by how it is written and by what is here.

    classify("published/llama8b")                        a folder, where there is one
    classify("s3://bucket/models/r@v20261121-3f1c0a52")  a bucket, and a tag of what is in it
    classify("org/name@main")                            a repository of the Hub at a revision

What is here goes before a repository of its name; hf://org/name always means the Hub. Nothing is opened or asked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

HUB_SCHEME: Final = "hf://"
_REPOSITORY: Final = re.compile(rf"((?:{HUB_SCHEME})?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?", re.ASCII)
_REVISED: Final = re.compile(r"(.+)@([^@/]+)", re.DOTALL)


class Argument(NamedTuple):
    """``place`` is what was typed, without the ``revision`` behind an @. A recipe is a file; a name is all else."""

    kind: Literal["folder", "recipe", "file", "repository", "bucket", "name"]
    place: str
    revision: str | None = None


def classify(text: str) -> Argument:
    """What a person means; any text is something."""
    revised = _REVISED.fullmatch(text)
    place, revision = revised.groups() if revised else (text, None)
    if "://" not in text:
        for name, tag in ((text, None), (place, revision)):
            if name and Path(name).is_dir():
                return Argument("folder", name, tag)
        if text.endswith((".yaml", ".yml")):
            return Argument("recipe", text)
        if Path(text).is_file():
            return Argument("file", text)
    if found := _REPOSITORY.fullmatch(text):
        return Argument("repository", *found.groups())
    return Argument("bucket", place, revision) if "://" in text else Argument("name", text)
