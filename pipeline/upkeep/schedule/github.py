"""A schedule as a workflow of GitHub Actions, on a runner of one's own.

GitHub begins late when it is busy, and drops times when it is very busy. A schedule has had a time zone since March
2026, which older servers of one's own do not know. The workflow gets no right but to read its repository, and to ask
for an identity where the recipe signs without a key. Its one action is pinned to a commit. Secrets are named; their
values are GitHub's to keep.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, Final

from pipeline.base.errors import UserError
from pipeline.serving.render.invocation import dump
from pipeline.upkeep.schedule.export import (
    PREFIX,
    UTC_NAMES,
    Export,
    classic_or_refuse,
    needed_secrets,
    refuse_missed,
    signs_keyless,
)
from pipeline.upkeep.schedule.recipes import Scheduled

CHECKOUT: Final = "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd"
_CHECKOUT_VERSION: Final = "v6.0.2"
_LONGEST_MINUTES: Final = 5 * 24 * 60
"""What GitHub allows a job on a runner of one's own; a job that says nothing ends after six hours."""
_SECRET: Final = re.compile(r"(?!GITHUB_)[A-Za-z_][A-Za-z0-9_]*")


def workflow(item: Scheduled, export: Export, *, runner: Sequence[str], secrets: Sequence[str] = ()) -> dict[str, str]:
    """The text of ``quantmint-NAME.yml`` for .github/workflows.

    ``runner`` are the labels of the runner, ``secrets`` names of the repository's secrets that the command gets beside
    those which the recipe needs. UserError for what GitHub cannot say.
    """
    if not runner:
        raise UserError("found no labels of a runner", hint="Name them: --runner self-hosted,mi300x")
    for name in secrets:
        if not _SECRET.fullmatch(name):
            raise UserError(f"--secret: found {name!r}, expected the name of a secret: letters, digits and _")
    command = shlex.join(export.command(item))
    if any("${{" in text for text in (command, export.directory or "", *export.variables.values())):
        raise UserError("found ${{ in what would run, which GitHub would replace", hint="Rename what holds it.")
    refuse_missed(item, "GitHub, when it is busy or no runner is there,")
    time = {"cron": classic_or_refuse(item, "GitHub", either_day=True)}
    if item.zone not in UTC_NAMES:
        time["timezone"] = item.zone
    wanted = dict.fromkeys((*needed_secrets(item.recipe), *secrets))
    environment = {**export.variables, **{name: f"${{{{ secrets.{name} }}}}" for name in wanted}}
    step: dict[str, Any] = {"name": f"Make {item.name} again if it is due"}
    if export.directory is not None:
        step["working-directory"] = export.directory
    if environment:
        step["env"] = environment
    # Store and published folders in the workspace stay, and no token of the repository is left there.
    checkout = {"uses": CHECKOUT, "with": {"persist-credentials": False, "clean": False}}
    document = {
        "name": f"quantmint: {item.name}",
        "on": {"schedule": [time], "workflow_dispatch": {}},
        "permissions": {"contents": "read", **({"id-token": "write"} if signs_keyless(item.recipe) else {})},
        "concurrency": {"group": f"{PREFIX}{item.name}", "cancel-in-progress": False},
        "jobs": {
            "requantize": {
                "runs-on": list(runner),
                "timeout-minutes": _LONGEST_MINUTES,
                "steps": [*([checkout] if export.directory is None else []), {**step, "run": command}],
            }
        },
    }
    file = f"{PREFIX}{item.name}.yml"
    head = export.header(file, item.words, "GitHub begins late when it is busy, and only what is on the default branch")
    return {file: head + dump(document).replace(CHECKOUT, f"{CHECKOUT}  # {_CHECKOUT_VERSION}")}
