"""Keep the answers to the items of a task across runs, under everything that shaped them.

A new margin, another limit, one more look or a run that was interrupted asks only the items that have no answer yet:

    store/answers/<SHA-256 of server, model, task, lm-eval>/<task>/documents.json
    store/answers/<SHA-256 of server, model, task, lm-eval>/<task>/<SHA-256 of the items>.jsonl.gz

Data read from the Hub at no fixed commit may change unseen: answers to it serve the current run alone.
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
    """Split items into batches that are kept one by one: a twentieth of the task's ``planned`` items, 100 at least.

    An interruption loses at most one batch, and each batch costs lm-eval a fraction of a second. The split depends on
    no clock, because items that share a batch can change the last bit of an answer.
    """
    size = max(_LEAST, -(-planned // _SHARES))
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """The stored answers to one task, in ``folder``, which runs share: one file for each batch of items."""

    folder: Path

    def documents(self) -> Mapping[str, Any] | None:
        """Return the reply of `Harness.load` for the task, None where it was never stored; mark the folder as used."""
        try:
            loaded: Mapping[str, Any] = json.loads((self.folder / _DOCUMENTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        os.utime(self.folder.parent)  # the collection of garbage asks when it was last of use
        return loaded

    def keep_documents(self, loaded: Mapping[str, Any]) -> None:
        """Store the reply of `Harness.load`: the task's documents, and the data sets that they come from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _DOCUMENTS, dict(loaded))

    def find(self, items: Sequence[Item]) -> tuple[Asked, ...]:
        """Return the known answers to the ``items``, batch by batch; each item at most once.

        Batches that were asked with other settings than the newest are left out, and so are damaged ones.
        """
        missing = set(items)
        batches: list[Asked] = []
        for path in sorted(self.folder.glob("*.jsonl.gz"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                batch = read_asked(path)
            except MeasurementError:  # a disk that was full, or lost its power
                continue
            if batches and batch.settings != batches[0].settings:
                continue
            part = batch.on(missing)
            if part.samples:
                batches.append(part)
                missing -= {(sample.task, sample.doc_id) for sample in part.samples}
            if not missing:
                break
        return tuple(batches)

    def keep(self, batch: Path, items: Sequence[Item], faults: Sequence[str]) -> None:
        """Move ``batch``, a file of answers to ``items``, into the folder, and record the server's new ``faults``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if new := [fault for fault in faults if fault not in self.faults()]:
            write_json(self.folder / _FAULTS, [*self.faults(), *new])
        batch.replace(self.folder / f"{items_digest(items)}.jsonl.gz")

    def faults(self) -> list[str]:
        """Return the log lines of the answering servers that void a measurement."""
        with suppress(OSError, ValueError):
            return list(json.loads((self.folder / _FAULTS).read_text(encoding="utf-8")))
        return []


def known_answers(job: Job, stage: Stage, task: SuiteTask) -> KnownAnswers:
    """Return the store of answers to a task of the suite; see `answers_to`."""
    return answers_to(job, stage, task.task, lm_eval.task_settings(job.setting, task))


def answers_to(job: Job, stage: Stage, name: str, settings: Mapping[str, object]) -> KnownAnswers:
    """Return the store of answers under ``name``, which runs share where server, model, settings and tools are equal.

    ``settings`` are all that shapes the answers beside server, model and tools. With `Job.again` (`--redo`) the stored
    answers are deleted first.
    """
    asking = {
        "inputs": {name: job.inputs[name].fingerprint for name in ("serve", "model")},
        "settings": dict(settings),
        "tools": dict(stage.tools(job.setting)),
        "version": stage.version,
    }
    folder = job.setting.store.root / ANSWERS / fingerprint(asking)
    if job.again:
        shutil.rmtree(folder, ignore_errors=True)
    return KnownAnswers(folder / name)
