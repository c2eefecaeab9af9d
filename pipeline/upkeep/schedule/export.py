"""What every exported schedule has: the command that it runs, where and with what. What a target cannot say is refused.

A scheduler that leaves out a time, or comes twice, does no harm: a look that finds nothing due changes nothing, and the
next makes up for a lost one. So clock changes are left to each scheduler's own rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pipeline.base.cron import classic, is_classic, parsed, weekdays
from pipeline.base.errors import UserError
from pipeline.recipe.schema import Recipe
from pipeline.upkeep.schedule.recipes import Scheduled

PREFIX: Final = "quantmint-"
UTC_NAMES: Final = ("UTC", "Etc/UTC")


@dataclass(frozen=True, slots=True)
class Export:
    """How the command is run. ``program`` is what starts quantmint, word by word; ``variables`` are nothing secret.

    ``made_by`` is the command line that makes such files.
    """

    program: tuple[str, ...]
    made_by: str
    directory: str | None = None
    store: str | None = None
    on: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    environment_file: str | None = None

    def command(self, item: Scheduled, *more: str) -> tuple[str, ...]:
        """The whole command, word by word."""
        store = () if self.store is None else ("--store", self.store)
        on = () if self.on is None else ("--on", self.on)
        return (*self.program, "requantize", item.given, "--due", *store, *on, *more)

    def header(self, file: str, *lines: str) -> str:
        """A comment that says what the file is and how it is made again."""
        return comment(f"{file}: made by `{self.made_by}`; make it again rather than edit it", *lines)


def comment(*lines: str) -> str:
    """Lines that begin with ``#``."""
    return "".join(f"# {line}\n" for line in lines)


def classic_or_refuse(item: Scheduled, scheduler: str, *, either_day: bool = False) -> str:
    """The expression as every cron reads it; UserError where ``scheduler`` cannot say it.

    With ``either_day`` the scheduler takes one of day of month and day of week as enough wherever both are given.
    """
    if not is_classic(item.expression):
        raise refusal(item, f"{scheduler} knows no L, LW or #", "Use `quantmint schedule run`, which does.")
    sim = parsed(item.expression)
    if either_day and sim.day_and and len(sim.days) < 31 and len(weekdays(sim)) < 7:
        what = f"day of month and day of week both must hold, and one is enough for {scheduler}"
        raise refusal(item, what, "Use --systemd, or `quantmint schedule run`.")
    return classic(item.expression)


def refuse_missed(item: Scheduled, scheduler: str) -> None:
    """UserError for `missed: run` in a scheduler that forgets the times at which it did not run."""
    if not item.skips_missed:
        hint = "Say `missed: skip` in the recipe, or use --systemd or --kubernetes, which keep it."
        raise refusal(item, f"refresh.missed: run cannot be kept: {scheduler} forgets what it missed", hint)


def refusal(item: Scheduled, what: str, hint: str) -> UserError:
    """A recipe whose schedule the target cannot express."""
    return UserError(f"{item.name} ({item.expression}, {item.zone}): {what}", hint=hint)


def needed_secrets(recipe: Recipe) -> tuple[str, ...]:
    """The secrets that a recipe's run needs, by the names of their variables."""
    hub = recipe.source.repo is not None or recipe.publish.hub is not None
    signs = recipe.publish.sign is not None and recipe.publish.sign.key is not None
    return (*(["HF_TOKEN"] if hub else []), *(["QUANTMINT_SIGNING_PASSPHRASE"] if signs else []))


def signs_keyless(recipe: Recipe) -> bool:
    """Whether it is signed by an identity that Sigstore knows."""
    return recipe.publish.sign is not None and recipe.publish.sign.keyless
