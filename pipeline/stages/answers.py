"""Answers to the items of a task, kept across runs under what asked them.

A new margin, another limit, one more look or a run that was interrupted asks only the items that nobody has asked yet:

    store/answers/<SHA-256 of server, model, task, lm-eval>/<task>/documents.json
    store/answers/<SHA-256 of server, model, task, lm-eval>/<task>/<SHA-256 of the items>.jsonl.gz

What is read from the Hub at no fixed commit may change unseen: such answers serve the run that is going on alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness import Asked, Item, items_digest, read_asked
from quantmint.eval.suites import SuiteTask
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.stages import lm_eval
from quantmint.pipeline.stages.stage import Job, Stage, write_json
from quantmint.pipeline.store.tree import ANSWERS

_DOCUMENTS: Final = "documents.json"
_FAULTS: Final = "faults.json"
_SHARES: Final = 20
_LEAST: Final = 100


def chunks(items: Sequence[Item], planned: int) -> Iterator[Sequence[Item]]:
    """Part items into batches that are kept one by one: a twentieth of what is planned of the task, 100 at least.

    An interruption costs at most one of them, and each costs lm-eval a fraction of a second. They depend on no clock,
    for which items share a batch can change a last bit.
    """
    size = max(_LEAST, -(-planned // _SHARES))
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """The answers to one task in a folder."""

    folder: Path

    def documents(self) -> Mapping[str, Any] | None:
        """Return what `Harness.load` answered when the task was loaded, or None."""
        try:
            loaded: Mapping[str, Any] = json.loads((self.folder / _DOCUMENTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        os.utime(self.folder.parent)  # the collection of garbage asks when it was last of use
        return loaded

    def keep_documents(self, loaded: Mapping[str, Any]) -> None:
        """Keep the documents of a task and the data sets that they come from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _DOCUMENTS, dict(loaded))

    def find(self, items: Sequence[Item]) -> tuple[Asked, ...]:
        """Return the answers that are known to some of the items, by batch; no item comes twice.

        Batches that were asked in another way than the newest are left out, and so is a damaged one.
        """
        wanted = set(items)
        found: list[Asked] = []
        for path in sorted(self.folder.glob("*.jsonl.gz"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                batch = read_asked(path)
            except MeasurementError:  # a disk that was full, or lost its power
                continue
            if found and batch.settings != found[0].settings:
                continue
            part = batch.on(wanted)
            if part.samples:
                found.append(part)
                wanted -= {(sample.task, sample.doc_id) for sample in part.samples}
            if not wanted:
                break
        return tuple(found)

    def keep(self, batch: Path, items: Sequence[Item], faults: Sequence[str]) -> None:
        """Take a file of answers, and before it the faults of the server that gave them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if new := [fault for fault in faults if fault not in self.faults()]:
            write_json(self.folder / _FAULTS, [*self.faults(), *new])
        batch.replace(self.folder / f"{items_digest(items)}.jsonl.gz")

    def faults(self) -> list[str]:
        """Return what the logs of the servers that answered say that voids a measurement."""
        with suppress(OSError, ValueError):
            return list(json.loads((self.folder / _FAULTS).read_text(encoding="utf-8")))
        return []


def known_answers(job: Job, stage: Stage, task: SuiteTask) -> KnownAnswers:
    """Return the answers that runs of this store share, under what asks a task in a stage.

    Those of a stage that is made anew by wish are forgotten.
    """
    asking = {
        "inputs": {name: job.inputs[name].fingerprint for name in ("serve", "model")},
        "settings": lm_eval.task_settings(job.setting, task),
        "tools": dict(stage.tools(job.setting)),
        "version": stage.version,
    }
    folder = job.setting.store.root / ANSWERS / fingerprint(asking)
    if job.again:
        shutil.rmtree(folder, ignore_errors=True)
    return KnownAnswers(folder / task.task)
