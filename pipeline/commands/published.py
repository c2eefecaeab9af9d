"""Where a release is now, for the last lines of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.commands import operations
from pipeline.publish.opening import published_folder
from pipeline.publish.release import EVIDENCE
from pipeline.publish.target import Published
from pipeline.runner import Outcome
from pipeline.stage import Setting
from pipeline.stages.publish import published_in
from pipeline.stages.report import PAGE


def of(outcome: Outcome) -> Sequence[Published]:
    """Every place that the run's release is in; none where it was not published."""
    entry = outcome.entry("publish")
    return () if entry is None else published_in(entry)


def as_json(published: Sequence[Published]) -> list[dict[str, object]]:
    """One object for each place."""
    return [asdict(one) for one in published]


def page(outcome: Outcome, setting: Setting) -> Path | None:
    """The report's page: beside the checkpoint where readers get this very release from a folder, else in the store."""
    report = outcome.entry("report")
    if report is None:
        return None
    folder = published_folder(setting)
    tags = {one.tag for one in of(outcome)}
    shown = folder is not None and folder.is_symlink() and folder.resolve().name in tags
    return folder / EVIDENCE / PAGE if folder is not None and shown else report.file(PAGE)


def show(published: Sequence[Published], setting: Setting) -> None:
    """A line for each place: how it is named to vLLM, and the tag."""
    for one in published:
        place = operations.shown(one.place)
        waits = setting.recipe.publish.to == "candidate" and not one.current
        there = "  was there already" if one.again else ""
        waiting = f"  a candidate: quantmint promote {place}" if waits else ""
        click.echo(f"checkpoint  {place}  {one.tag}{there}{waiting}")
