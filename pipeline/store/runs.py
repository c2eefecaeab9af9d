"""One small file for each run: what it planned, how it ended.

`quantmint runs` lists them, and the garbage collector keeps what they refer to.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pipeline.base.canonical import Json
from pipeline.store.disk import disk_errors, write_atomic
from pipeline.store.entries import check_result, timestamp
from pipeline.store.locks import runs_still, this_process

RUN_SCHEMA: Final = 1
_RUNS: Final = "runs"


@dataclass(frozen=True)
class Run:
    """A run as its file tells it. ``finished`` is None while it goes on, and for ever if it was killed.

    Until it has ended its facts are which process it is.
    """

    path: Path
    recipe: str
    recipe_digest: str
    plan: tuple[tuple[str, str], ...]  # (stage, fingerprint) in order
    started: str
    finished: str | None = None
    verdict: str | None = None
    exit_code: int | None = None
    facts: dict[str, Json] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Its name among the runs of the store: when it began, the recipe, and a random part."""
        return self.path.stem

    @property
    def killed(self) -> bool:
        """Whether it has no end and never will have: its process was one of this machine's, and is gone."""
        return self.finished is None and runs_still(self.facts.get("process")) is False


class RunLog:
    """The file of a run that goes on."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def start(cls, root: Path, recipe: str, recipe_digest: str, plan: Sequence[tuple[str, str]]) -> RunLog:
        """Write the file of a run that begins, before its first look into the store at ``root``.

        From then on the garbage collector spares what ``plan`` names. Raises `StoreError`.
        """
        now = datetime.now(UTC)
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", recipe)[:80]
        name = f"{now.strftime('%Y%m%dT%H%M%S.%fZ')}-{slug}-{secrets.token_hex(4)}.json"
        facts: dict[str, Json] = {"process": {**this_process()}}
        log = cls(Run(root / _RUNS / name, recipe, recipe_digest, tuple(plan), timestamp(now), facts=facts))
        log._write()
        return log

    def replan(self, plan: Sequence[tuple[str, str]]) -> None:
        """Write that the run goes on with another plan, before it looks for what that names. Raises `StoreError`."""
        self.run = replace(self.run, plan=tuple(plan))
        self._write()

    def finish(self, verdict: str | None, exit_code: int, *, facts: Mapping[str, object] | None = None) -> Run:
        """Write how the run ended. ``facts`` is small plain JSON for readers. Raises `ValueError` or `StoreError`."""
        ended = timestamp(datetime.now(UTC))
        self.run = replace(
            self.run, finished=ended, verdict=verdict, exit_code=exit_code, facts=check_result(facts or {})
        )
        self._write()
        return self.run

    def _write(self) -> None:
        path = self.run.path
        data = {**asdict(self.run), "schema": RUN_SCHEMA}
        del data["path"]
        text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        raw = text.encode(errors="backslashreplace")  # half a character of a file's name is JSON's own escape then
        with disk_errors(path, needed=len(raw)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, raw, temporary=path.with_suffix(".tmp"))


def list_runs(root: Path) -> list[Run]:
    """Every run of the store at ``root``, newest first; files that cannot be read as one are passed over."""
    runs = [run for path in (root / _RUNS).glob("*.json") if (run := _read(path)) is not None]
    return sorted(runs, key=lambda run: run.path.name, reverse=True)


def _read(path: Path) -> Run | None:
    try:
        data = json.loads(path.read_bytes())
        if data.pop("schema") != RUN_SCHEMA:
            return None
        plan = tuple((str(stage), str(digest)) for stage, digest in data.pop("plan"))
        run = Run(path=path, plan=plan, **data)
        datetime.fromisoformat(run.started)
        return run if isinstance(run.recipe, str) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
