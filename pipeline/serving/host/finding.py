"""What a look at a machine ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check saw. ``values`` fill the braces of its texts in `checks.yaml`.

    Of a check that was skipped ``found`` is the reason.
    """

    status: Status
    found: str
    values: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `quantmint doctor`.

    ``fix`` is what to do, a command where one does it, and empty where nothing is wrong; ``as_root`` are the commands
    of it that need root. ``source`` names the guide and its section.
    """

    name: str
    status: Status
    found: str
    expected: str
    why: str
    fix: str
    as_root: tuple[str, ...]
    source: str

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return {**asdict(self), "as_root": list(self.as_root)}


def script(findings: tuple[Finding, ...]) -> str:
    """A bash script of the fixes that need root, each below a comment that says why. Nothing runs it but its reader."""
    lines = ["#!/usr/bin/env bash", "# Fixes that need root, found by `quantmint doctor`. Read it before you run it."]
    lines += ["set -euo pipefail"]
    given: set[str] = set()
    for finding in findings:
        commands = [command for command in finding.as_root if command not in given]
        if commands:
            lines += ["", f"# {finding.name}: found {finding.found}, expected {finding.expected}", *commands]
            given.update(commands)
    if not given:
        lines += ["", "# nothing to fix as root"]
    return "\n".join(lines) + "\n"
