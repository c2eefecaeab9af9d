"""Find the `report.json` of a finished run: in a published folder, in an entry of the store, or loose.

    find("published/llama8b-ptpc", store)     the evidence beside a published checkpoint
    find("llama8b-ptpc", store)               the newest report of the recipe's runs

The model itself is not read: the runs of the store say what was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantmint.eval.report.model import DATA
from quantmint.pipeline.base.argument import classify
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.publish.release import EVIDENCE
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.stages.gate import GATE
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import RunRecord, list_runs
from quantmint.pipeline.store.tree import Store


def find(name: str, store: Store) -> Path:
    """Return the path of the report.json for ``name``: a recipe, a file, or a folder that has one.

    A recipe stands for its newest run with a report. Raises `UserError` where there is none.
    """
    path, kind = Path(name), classify(name).kind
    if kind == "recipe":
        return _of_recipe(load_recipe(name).recipe.name, store)
    if kind == "name":
        return _of_recipe(name, store)
    if kind == "file" and path.suffix == ".json":
        return path
    report = next((file for file in (path / EVIDENCE / DATA, path / DATA) if file.is_file()), None)
    if report is not None:
        return report
    if not path.exists():
        raise UserError(f"{name}: there is no such file or folder")
    raise UserError(
        f"{name}: found neither {EVIDENCE}/{DATA} nor {DATA}",
        hint="name a published checkpoint, a report.json or its folder in the store, or a recipe that was run",
    )


def of_run(run: RunRecord, store: Store) -> Entry | None:
    """Return the entry of the report that a run ended with; None without one, or where the store no longer has it.

    It follows the run's record of its stages and not its plan, since a run that the canary stopped has another report.
    """
    stages: Any = run.facts.get("stages", {})
    return store.find("report", stages["report"]["fingerprint"]) if "report" in stages else None


def _of_recipe(name: str, store: Store) -> Path:
    runs = list_runs(store.root)
    report = next((entry for run in runs if run.recipe == name and (entry := of_run(run, store)) is not None), None)
    if report is not None:
        return report.file(DATA)
    names = {run.recipe for run in runs}
    raise UserError(
        f"{name}: there is no such file or folder, and no report of such a recipe in {store.root}"
        f"{'' if name in names else did_you_mean(name, sorted(names))}",
        hint="`quantmint runs` lists the runs, --store names another store",
    )


def gate_of(report: Path, store: Store) -> Path | None:
    """Return the path of the gate's record beside a `report.json`, else of the one in the store that it was made from.

    None without either.
    """
    if (report.parent / GATE).is_file():
        return report.parent / GATE
    folder = report.parent.resolve()
    if folder.parent.name == "report":
        store = Store(folder.parent.parent)  # the report's own, wherever it lies
    try:
        entry = store.find("report", folder.name) if folder.parent.name == "report" else None
    except ValueError:  # the folder's name is no fingerprint
        return None
    gate = None if entry is None else entry.record.inputs.get("gate")
    record = None if gate is None else store.find("gate", gate)
    return None if record is None else record.file(GATE)
