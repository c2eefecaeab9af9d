"""Writing the site, so that a reader finds the old file or the new one and never half of either.

    site/index.html                    the index
    site/index.json                    its rows: what an earlier run came to stays, also when the store forgets it
    site/reports/<digest>/             each report once, named by the digest of its files

Only what is new is read and copied. Reports come first and the index last, and what neither the site nor the store has
is not linked: a link never leads nowhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eval.errors import MeasurementError
from pipeline.base.errors import UserError
from pipeline.stages.report import DATA, PAGE
from pipeline.stages.site.page import render
from pipeline.stages.site.rows import UNFINISHED, Row, row_of
from pipeline.store.disk import disk_errors, write_atomic
from pipeline.store.locks import Lock
from pipeline.store.runs import list_runs
from pipeline.store.tree import Store

INDEX, ROWS, REPORTS = "index.html", "index.json", "reports"
SCHEMA = 1
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Built:
    """What a site shows, newest run first, and how many reports were copied just now."""

    rows: tuple[Row, ...]
    copied: int


def build(output: Path, store: Store, *, on_warning: Callable[[str], None] = lambda _: None) -> Built:
    """Bring the site at `output` up to date with a store; several stores may be gathered into one site in turns.

    Raises `UserError` for a folder that holds something else, `StoreError` where the disk refuses.
    """
    _require_ours(output)
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        with Lock(output / ".lock"):
            known = _known(output, on_warning)
            rows, copied = dict(known), 0
            for run in list_runs(store.root):
                before = known.get(run.id)
                if before is not None and _stays(before, output):
                    continue
                row, folder = row_of(run, store)
                if folder is not None and row.judged is not None:
                    copied += _copy(folder, output / REPORTS / row.judged.page)
                if before is None or before.judged is None or row.judged is not None:
                    rows[run.id] = row
            ordered = tuple(sorted(rows.values(), key=lambda row: row.run, reverse=True))
            data = {"schema": SCHEMA, "runs": [row.to_json() for row in ordered]}
            _write(output / ROWS, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            at_hand = frozenset(path.parent.name for path in (output / REPORTS).glob(f"*/{PAGE}"))
            _write(output / INDEX, render(ordered, at_hand))
    return Built(ordered, copied)


def _require_ours(output: Path) -> None:
    """A folder that is there must be empty or a site: somebody's index.html is not written over."""
    if output.is_dir() and any(output.iterdir()) and not (output / ROWS).is_file():
        rest = {path.name for path in output.iterdir()}
        if rest - {".lock", REPORTS}:
            raise UserError(
                f"--output: found a folder with other files, {output}, expected an empty one or a site",
                hint="name a folder of its own",
            )


def _known(output: Path, on_warning: Callable[[str], None]) -> Mapping[str, Row]:
    path = output / ROWS
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"it is not of schema {SCHEMA}")
        rows = [Row.from_json(row) for row in data["runs"]]
    except (MeasurementError, ValueError, KeyError, TypeError) as error:
        on_warning(f"{path} cannot be read and is made anew from the store: {error}")
        return {}
    return {row.run: row for row in rows}


def _stays(row: Row, output: Path) -> bool:
    """Whether nothing about the row can be new: the run has ended, and its report, if it has one, is here."""
    if row.status == UNFINISHED:
        return False
    return row.judged is None or (output / REPORTS / row.judged.page / PAGE).is_file()


def _copy(source: Path, target: Path) -> int:
    """Copy a report's page and data; its name is its digest, so what is there is never other bytes."""
    if target.is_dir():
        return 0
    partial = target.with_name(target.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in (PAGE, DATA):
        shutil.copyfile(source / name, partial / name)
    partial.rename(target)
    return 1


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomic(path, text.encode(), temporary=path.with_name(path.name + _PARTIAL))
