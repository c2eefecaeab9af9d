"""What a finished run left, wherever it lies: a published folder, an entry of the store, or a loose `report.json`.

    find("published/llama8b-ptpc", store)     the evidence beside a published checkpoint
    find("llama8b-ptpc", store)               the newest report that a run of the recipe made

Nothing of the model is looked at, and no recipe is read: what was made is told by the runs of the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval.report.model import DATA, JUNIT, PAGE
from pipeline.base.errors import UserError, did_you_mean
from pipeline.publish.release import EVIDENCE
from pipeline.stages.gate import GATE
from pipeline.store.entries import Entry
from pipeline.store.runs import Run, list_runs
from pipeline.store.tree import Store


@dataclass(frozen=True, slots=True)
class Finished:
    """The files of a judgement: `report` is its `report.json`; the others are None where they are not at hand."""

    report: Path
    page: Path | None
    gate: Path | None
    junit: Path | None


def find(given: str, store: Store) -> Finished:
    """Where the evidence of what a person named lies; raises `UserError` where there is none."""
    path = Path(given)
    if path.is_file():
        if path.suffix != ".json":
            raise UserError(
                f"{given}: found a {path.suffix or 'file'}, expected a report.json, a folder or a recipe's name"
            )
        return _beside(path, store)
    if path.is_dir():
        for folder in (path / EVIDENCE, path):
            if (folder / DATA).is_file():
                return _beside(folder / DATA, store)
        raise UserError(
            f"{given}: found neither {EVIDENCE}/{DATA} nor {DATA}",
            hint="name a published checkpoint, or the folder of a report in the store",
        )
    if path.suffix or "/" in given:
        raise UserError(f"{given}: there is no such file or folder")
    return _of_recipe(given, store)


def of_run(run: Run, store: Store) -> Entry | None:
    """The report that a run ended with, where the store still has it."""
    made = made_by(run, "report")
    return None if made is None else store.find("report", made)


def made_by(run: Run, stage: str) -> str | None:
    """The fingerprint of a stage's result in a run; None where the run did not get that far.

    What a run really did counts before its plan: one that the canary stopped has a report of another fingerprint.
    """
    stages = run.facts.get("stages")
    facts = stages.get(stage) if isinstance(stages, dict) else None
    if isinstance(facts, dict):
        made = facts.get("fingerprint")
        return str(made) if made else dict(run.plan).get(stage)
    return None


def of_entry(entry: Entry, store: Store) -> Finished:
    """The files of a report in the store, with the gate's record that it was made from."""
    return _beside(entry.file(DATA), store, entry)


def last(recipe: str, store: Store) -> tuple[Run, Entry] | None:
    """The newest run of a recipe whose report the store still has, with that report."""
    mine = (run for run in list_runs(store.root) if run.recipe == recipe)
    return next(((run, entry) for run in mine if (entry := of_run(run, store)) is not None), None)


def _of_recipe(name: str, store: Store) -> Finished:
    found = last(name, store)
    if found is not None:
        return of_entry(found[1], store)
    names = sorted({run.recipe for run in list_runs(store.root)})
    raise UserError(
        f"{name}: there is no such file or folder, and no report of such a recipe in {store.root}"
        f"{'' if name in names else did_you_mean(name, names)}",
        hint="`quantmint runs` lists the runs, --store names another store",
    )


def _beside(report: Path, store: Store, entry: Entry | None = None) -> Finished:
    def at_hand(name: str) -> Path | None:
        path = report.parent / name
        return path if path.is_file() else None

    return Finished(report, at_hand(PAGE), at_hand(GATE) or _gate_of(report, store, entry), at_hand(JUNIT))


def _gate_of(report: Path, store: Store, entry: Entry | None) -> Path | None:
    """The record in the store that a report of the store was made from."""
    if entry is None:
        folder = report.parent.resolve()
        try:
            entry = store.find("report", folder.name) if folder.parent.name == "report" else None
        except ValueError:  # the folder's name is no fingerprint
            return None
    gate = None if entry is None else entry.record.inputs.get("gate")
    found = None if gate is None else store.find("gate", gate)
    return None if found is None else found.file(GATE)
