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
from datetime import timedelta
from itertools import pairwise
from typing import Any

from pipeline.errors import UserError
from pipeline.recipe.schema import Recipe
from pipeline.schedule.cron import next_times, parsed
from pipeline.schedule.exported import PREFIX, Export, comment, refusal, refuse_clock_changes, refuse_missed
from pipeline.schedule.expression import DAYS, WEEK, InexpressibleError, classic
from pipeline.schedule.recipes import Scheduled
from pipeline.serving.render.comments import dump

CHECKOUT = "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd"
_CHECKOUT_VERSION = "v6.0.2"
_LONGEST_MINUTES = 5 * 24 * 60
"""What GitHub allows a job on a runner of one's own; a job that says nothing ends after six hours."""
_CLOSEST = timedelta(minutes=5)
_UTC = ("UTC", "Etc/UTC")
_SECRET = re.compile(r"(?!GITHUB_)[A-Za-z_][A-Za-z0-9_]*")


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
    times, file = _times(item, export), f"{PREFIX}{item.name}.yml"
    wanted = tuple(dict.fromkeys((*needed(item.recipe), *secrets)))
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
        "on": {"schedule": times, "workflow_dispatch": {}},
        "permissions": {"contents": "read", **({"id-token": "write"} if _keyless(item.recipe) else {})},
        "concurrency": {"group": f"{PREFIX}{item.name}", "cancel-in-progress": False},
        "jobs": {
            "requantize": {
                "runs-on": list(runner),
                "timeout-minutes": _LONGEST_MINUTES,
                "steps": [*([checkout] if export.directory is None else []), {**step, "run": command}],
            }
        },
    }
    head = (
        *export.header(item, file),
        "GitHub begins late when it is busy, and only what is on the default branch",
    )
    text = dump(document).replace(CHECKOUT, f"{CHECKOUT}  # {_CHECKOUT_VERSION}")
    return {file: comment(*head) + text}


def needed(recipe: Recipe) -> tuple[str, ...]:
    """The secrets that a recipe's run needs, by the names of their variables."""
    hub = recipe.source.repo is not None or recipe.publish.hub is not None
    signs = recipe.publish.sign is not None and recipe.publish.sign.key is not None
    return (*(["HF_TOKEN"] if hub else []), *(["QUANTMINT_SIGNING_PASSPHRASE"] if signs else []))


def _keyless(recipe: Recipe) -> bool:
    return recipe.publish.sign is not None and recipe.publish.sign.keyless


def _times(item: Scheduled, export: Export) -> list[dict[str, str]]:
    refuse_missed(item, export, "GitHub drops times when it is busy, and when no runner is there within a day")
    refuse_clock_changes(item, export, "GitHub")
    sim = parsed(item.expression)
    if sim.day_and and sim.days != DAYS and not WEEK.issubset(sim.weekdays):
        raise refusal(item, "GitHub does not say whether both days must hold", "Give one of the two.")
    soon = next_times(item.expression, "UTC", export.now, 60)
    if any(later - former < _CLOSEST for former, later in pairwise(soon)):
        raise refusal(item, "GitHub runs nothing more often than every five minutes", "Choose fewer times.")
    try:
        time = {"cron": classic(item.expression)}
    except InexpressibleError as error:
        raise refusal(item, f"GitHub cannot say {error}", "Use --systemd, or `quantmint schedule run`.") from None
    return [time if item.zone in _UTC else {**time, "timezone": item.zone}]
