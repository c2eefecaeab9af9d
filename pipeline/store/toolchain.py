"""Versions and licences of the distributions that a stage ran on, read from their metadata without importing them.

A stage that shapes bytes or figures stores this list beside its output: a bill of materials made later, perhaps on
another machine, would list other versions.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from email.message import Message
from email.parser import HeaderParser
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quantmint.pipeline.base.errors import ServingError
from quantmint.pipeline.store.entries import Entry

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ENVIRONMENT: Final = "environment.json"
OURS: Final = "quantmint"
_LONGEST = 100  # characters of a licence's name; what is longer is its text


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution's version, and its licence as an SPDX expression or in its own words (None: not stated)."""

    version: str
    licence: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python version, and the installed distributions by normalized name (PEP 503)."""

    python: str
    distributions: Mapping[str, Distribution]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a plain mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Environment:
        """Read a mapping that `to_json` wrote."""
        return cls(data["python"], {name: Distribution(**fields) for name, fields in data["distributions"].items()})


def environment_here(tools: Iterable[str]) -> Environment:
    """Return the part of this environment that the named tools and quantmint require, themselves included.

    It is cached for the process.
    """
    return _environment(frozenset(tools))


@cache
def _environment(tools: frozenset[str]) -> Environment:
    return Environment(platform.python_version(), _facts(_required(tools, _installed(None))))


def environment_of(python: Path) -> Environment:
    """Return all distributions of another environment, given its interpreter. Raises `ServingError` if that fails.

    None is left out, because vLLM has an environment of its own, and builds for a platform do not always declare their
    requirements.
    """
    program = "import json, platform, sys; print(json.dumps([platform.python_version(), sys.path]))"
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", program], check=True, capture_output=True, text=True, timeout=60, cwd="/"
        )
        version, path = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ServingError(f"{python} does not say where its packages are: {error}") from error
    return Environment(version, _facts(_installed([place for place in path if place])))


def recorded_environment(entry: Entry) -> Environment | None:
    """Return the environment that an entry's stage ran in; None for an entry from before this was recorded."""
    if ENVIRONMENT not in entry.record.files:
        return None
    return Environment.from_json(json.loads(entry.file(ENVIRONMENT).read_text(encoding="utf-8")))


def _installed(path: Sequence[str] | None) -> dict[str, Message]:
    """Return the distributions' metadata by normalized name; the first of a name counts.

    ``path`` are the folders to search (None: those of this environment).
    """
    from packaging.utils import canonicalize_name

    installed: dict[str, Message] = {}
    for distribution in metadata.distributions() if path is None else metadata.distributions(path=list(path)):
        # Without the description: ``found.metadata`` parses hundreds of README files again.
        fields = HeaderParser().parsestr((distribution.read_text("METADATA") or "").partition("\n\n")[0])
        name = fields["Name"]
        if name:  # a folder that was removed by halves has none
            installed.setdefault(canonicalize_name(str(name)), fields)
    return installed


def _facts(by_name: Mapping[str, Message]) -> dict[str, Distribution]:
    return {name: Distribution(str(by_name[name]["Version"]), _licence(by_name[name])) for name in sorted(by_name)}


def _required(tools: Iterable[str], installed: Mapping[str, Message]) -> dict[str, Message]:
    """Return the part of ``installed`` that the tools and quantmint require, the tools included.

    Requested extras are followed, also those that quantmint requests of a tool: ``lm-eval[api]`` provides the HTTP
    client.
    """
    from packaging.utils import canonicalize_name

    waiting = [(canonicalize_name(tool), "") for tool in tools]
    tool_names = {name for name, _ in waiting}
    if OURS in installed:
        ours = [
            (canonicalize_name(requirement.name), requirement.extras) for requirement in _requirements(installed[OURS])
        ]
        waiting += [(name, extra) for name, extras in ours if name in tool_names for extra in extras]
        waiting.append((canonicalize_name(OURS), ""))
    followed: set[tuple[str, str]] = set()
    while waiting:
        name, extra = waiting.pop()
        if name in installed and (name, extra) not in followed:
            followed.add((name, extra))
            for requirement in _requirements(installed[name]):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    waiting += [
                        (canonicalize_name(requirement.name), needed_extra)
                        for needed_extra in ("", *requirement.extras)
                    ]
    return {name: installed[name] for name, _ in followed}


def _requirements(fields: Message) -> Iterator[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    for text in fields.get_all("Requires-Dist") or ():
        with suppress(InvalidRequirement):  # written before there were rules
            yield Requirement(str(text))


def _licence(fields: Message) -> str | None:
    """Return a distribution's licence: PEP 639's expression, else the older fields if they hold a name, else None."""
    expression = fields["License-Expression"]
    if expression:
        return str(expression)
    named = str(fields["License"] or "").strip()
    if named and named != "UNKNOWN" and "\n" not in named and len(named) <= _LONGEST:
        return named
    classified = [str(text) for text in fields.get_all("Classifier") or () if str(text).startswith("License :: ")]
    return classified[0].rpartition(" :: ")[2] if classified else None
