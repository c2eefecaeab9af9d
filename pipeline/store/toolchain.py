"""The distributions that a stage's work ran on: versions and licences, as their own metadata says; nothing is imported.

A stage that shapes bytes or figures keeps this beside its output, because it is true then and there. A bill of
materials that is put together later, on another machine perhaps, would otherwise list what is installed by then.
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
    """A distribution's version, and its licence as an SPDX expression or as it calls it (None: it does not say)."""

    version: str
    licence: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """A version of Python, and distributions by their normalized names."""

    python: str
    distributions: Mapping[str, Distribution]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Environment:
        """Read back what `to_json` wrote."""
        return cls(data["python"], {name: Distribution(**found) for name, found in data["distributions"].items()})


def environment_here(tools: Iterable[str]) -> Environment:
    """Return some distributions of this environment with all that they and quantmint need; read once in a process."""
    return _environment(frozenset(tools))


@cache
def _environment(tools: frozenset[str]) -> Environment:
    return Environment(platform.python_version(), _facts(_reached(tools, _there(None))))


def environment_of(python: Path) -> Environment:
    """All of another environment, by its interpreter. Raises `ServingError` where that does not answer.

    All, because vLLM has an environment of its own, and because builds for a platform do not always say what they need.
    """
    asked = "import json, platform, sys; print(json.dumps([platform.python_version(), sys.path]))"
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", asked], check=True, capture_output=True, text=True, timeout=60, cwd="/"
        )
        version, path = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ServingError(f"{python} does not say where its packages are: {error}") from error
    return Environment(version, _facts(_there([place for place in path if place])))


def recorded_environment(entry: Entry) -> Environment | None:
    """Return the environment that an entry's stage ran in; None for an entry from before this was recorded."""
    if ENVIRONMENT not in entry.record.files:
        return None
    return Environment.from_json(json.loads(entry.file(ENVIRONMENT).read_text(encoding="utf-8")))


def _there(path: Sequence[str] | None) -> dict[str, Message]:
    """Metadata by normalized name, of this environment or of the folders in ``path``; the first found counts."""
    from packaging.utils import canonicalize_name

    there: dict[str, Message] = {}
    for found in metadata.distributions() if path is None else metadata.distributions(path=list(path)):
        # Without the description: ``found.metadata`` parses hundreds of README files again.
        fields = HeaderParser().parsestr((found.read_text("METADATA") or "").partition("\n\n")[0])
        name = fields["Name"]
        if name:  # a folder that was removed by halves has none
            there.setdefault(canonicalize_name(str(name)), fields)
    return there


def _facts(found: Mapping[str, Message]) -> dict[str, Distribution]:
    return {name: Distribution(str(found[name]["Version"]), _licence(found[name])) for name in sorted(found)}


def _reached(tools: Iterable[str], there: Mapping[str, Message]) -> dict[str, Message]:
    """Return the part of ``there`` that the tools' requirements and our own lead to, the tools included.

    Extras that somebody asks for are followed, ours of a tool too: ``lm-eval[api]`` is what asks over HTTP.
    """
    from packaging.utils import canonicalize_name

    waiting = [(canonicalize_name(tool), "") for tool in tools]
    named = {name for name, _ in waiting}
    if OURS in there:
        ours = [(canonicalize_name(wanted.name), wanted.extras) for wanted in _requirements(there[OURS])]
        waiting += [(name, extra) for name, extras in ours if name in named for extra in extras]
        waiting.append((canonicalize_name(OURS), ""))
    seen: set[tuple[str, str]] = set()
    while waiting:
        name, extra = waiting.pop()
        if name in there and (name, extra) not in seen:
            seen.add((name, extra))
            for wanted in _requirements(there[name]):
                if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                    waiting += [(canonicalize_name(wanted.name), more) for more in ("", *wanted.extras)]
    return {name: there[name] for name, _ in seen}


def _requirements(found: Message) -> Iterator[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    for text in found.get_all("Requires-Dist") or ():
        with suppress(InvalidRequirement):  # written before there were rules
            yield Requirement(str(text))


def _licence(found: Message) -> str | None:
    """PEP 639's expression, else what the older fields say as far as it is a name."""
    expression = found["License-Expression"]
    if expression:
        return str(expression)
    named = str(found["License"] or "").strip()
    if named and named != "UNKNOWN" and "\n" not in named and len(named) <= _LONGEST:
        return named
    classified = [str(text) for text in found.get_all("Classifier") or () if str(text).startswith("License :: ")]
    return classified[0].rpartition(" :: ")[2] if classified else None
