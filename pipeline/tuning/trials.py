"""Trials in the store: found again by what shaped them, made once, half ones made again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from eval.errors import MeasurementError
from pipeline.canonical import fingerprint
from pipeline.store.tree import Store
from pipeline.store.working import Work
from pipeline.tuning.results import Outcome
from pipeline.tuning.space import Trial
from pipeline.tuning.subject import STAGE, Subject


class Trials:
    """The trials of one subject. A damaged record is put into quarantine by the store, which says so."""

    def __init__(self, store: Store, subject: Subject, *, on_wait: Callable[[str], None]) -> None:
        self._store = store
        self._subject = subject
        self._on_wait = on_wait

    @property
    def log(self) -> Path:
        """Where the server that runs now writes."""
        return log_path(self._store, self._subject)

    def find(self, trial: Trial) -> Outcome | None:
        """What was measured before, by whichever sweep."""
        entry = self._store.find(STAGE, self._subject.fingerprint(trial))
        if entry is None:
            return None
        with suppress(KeyError, TypeError, MeasurementError):
            return Outcome.from_json(entry.record.result)
        self._store.retire(entry)  # sound, but of a version that wrote something else
        return None

    def forget(self, trial: Trial) -> None:
        """Measure it again next time."""
        entry = self._store.find(STAGE, self._subject.fingerprint(trial))
        if entry is not None:
            self._store.retire(entry)

    def make(self, trial: Trial, measure: Callable[[Work], Outcome]) -> Outcome:
        """Measure in an empty folder and commit; what raises leaves nothing that counts."""
        payload = self._subject.payload(trial)
        with self._store.working(STAGE, fingerprint(payload), on_wait=self._on_wait) as work:
            if work.existing is not None:
                return Outcome.from_json(work.existing.record.result)
            work.discard()
            started = datetime.now(UTC)
            outcome = measure(work)
            work.commit(
                payload=payload, result=outcome.to_json(), started=started, tools={"vllm": self._subject.vllm.version}
            )
            return outcome


def log_path(store: Store, subject: Subject) -> Path:
    """The log of a subject's servers, one after the other; what is over is in the entry of its trial."""
    return store.root / "logs" / f"tune-{subject.name}.log"
