"""quantmint explain RECIPE"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import click

from pipeline.canonical import ABSENT, Change
from pipeline.commands.options import emit, json_option, store_option, vllm_option

_DIGEST = re.compile("[0-9a-f]{64}")


@click.command(name="explain")
@click.argument("recipe")
@vllm_option
@store_option
@json_option
def command(recipe: str, vllm: str | None, store_path: Path, as_json: bool) -> int:
    """Say which input of which stage changed since RECIPE was last run."""
    from pipeline.explanation import explain
    from pipeline.planning import build_plan
    from pipeline.runner import foreseen
    from pipeline.session import open_setting
    from pipeline.store.tree import Store

    setting = open_setting(recipe, store=Store(store_path), vllm=vllm)
    explained = explain(foreseen(build_plan(setting), setting), setting)
    if as_json:
        emit([{"stage": e.key, "state": e.state, "changes": [_change(c) for c in e.changes]} for e in explained])
        return 0
    for entry in explained:
        click.echo(f"{entry.key:<20} {entry.state}")
        for change in entry.changes:
            for line in _lines(change):
                click.echo(f"{'':<20}   {line}")
    return 0


def _lines(change: Change) -> list[str]:
    """A change for people: of a text of several lines only those that differ, of a fingerprint what tells it apart."""
    place = change.path.removeprefix("$.")
    old, new = change.old, change.new
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        made = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        return [f"{place}:", *(f"  {line}" for line in made if not line.startswith(("---", "+++", "@@")))]
    return [f"{place}: {_short(old)} -> {_short(new)}"]


def _short(side: object) -> str:
    return side[:12] + "…" if isinstance(side, str) and _DIGEST.fullmatch(side) else repr(side)


def _change(change: Change) -> dict[str, object]:
    """A side that lacks the place has no key."""
    sides = {"old": change.old, "new": change.new}
    return {"path": change.path, **{side: value for side, value in sides.items() if value is not ABSENT}}
