"""Classify what a person names on a command line, by its spelling and by the files that are here.

    classify("published/llama8b")                        a folder, where there is one
    classify("s3://bucket/models/r@v20261121-3f1c0a52")  a bucket, and a tag in it
    classify("org/name@main")                            a repository of the Hub at a revision

A local folder takes precedence over a repository of its name; hf://org/name always means the Hub. Nothing is opened or
fetched.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

HUB_SCHEME: Final = "hf://"
_REPOSITORY: Final = re.compile(rf"((?:{HUB_SCHEME})?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?", re.ASCII)
_REVISED: Final = re.compile(r"(.+)@([^@/]+)", re.DOTALL)


class Argument(NamedTuple):
    """A classified argument: its kind, and ``place``, without the ``revision`` behind an @.

    A recipe is a YAML file; a name is any text that is nothing else.
    """

    kind: Literal["folder", "recipe", "file", "repository", "bucket", "name"]
    place: str
    revision: str | None = None


def classify(text: str) -> Argument:
    """Return the kind, place and revision of an argument.

    Existing folders come before recipes, files and repositories.
    """
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
    if repository := _REPOSITORY.fullmatch(text):
        return Argument("repository", *repository.groups())
    return Argument("bucket", place, revision) if "://" in text else Argument("name", text)
