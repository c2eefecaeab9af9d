"""Run a plan: find or make the entry of each stage, in order, and stop where a verdict says so.

Two things end a run before its plan does. An unsound checkpoint is an error: it is never served. A checkpoint that the
canary finds broken is a measured FAIL: the run goes on with `planner.after_stop`, whose gate and report need nothing
that takes long.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from quantmint.calibration.errors import CalibrationError
from quantmint.eval.errors import DefinitionError, MeasurementError
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import (
    InvalidMeasurementError,
    QuantmintError,
    StageError,
    StoreError,
    TerminatedError,
)
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.base.transience import is_transient
from quantmint.pipeline.runs.planner import after_stop, find_entry
from quantmint.pipeline.stages.serve import ServeStage, launch_plan
from quantmint.pipeline.stages.servers import Servers
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Planned
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import RunLog


@dataclass(frozen=True, slots=True)
class StageStep:
    """A finished stage of a run: its entry, whether the entry existed already, and the seconds it took now."""

    planned: Planned
    entry: Entry
    cached: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run that ended without an error; ``run`` is its id.

    ``verdict`` is None where nothing was judged; ``stopped`` is the key of the stage that stopped the run.
    """

    steps: tuple[StageStep, ...]
    verdict: Verdict | None
    run: str
    stopped: str | None = None

    @property
    def exit_code(self) -> int:
        """Return the verdict's exit code, 0 without a verdict."""
        return 0 if self.verdict is None else self.verdict.exit_code

    def entry(self, key: str) -> Entry | None:
        """Return the entry of a stage, None where the run did not reach it."""
        return next((step.entry for step in self.steps if step.planned.key == key), None)


def run_plan(
    plan: Sequence[Planned], setting: Setting, reporter: Reporter, *, redo: Collection[str] = ()
) -> RunOutcome:
    """Run a plan to its end, or to the verdict that ends it; record the run in the store.

    ``redo`` names stages to make again although the store has them. Raises `QuantmintError`; finished stages stay, and
    the same call resumes after them.
    """
    recipe = setting.recipe
    digest, file = fingerprint(recipe.model_dump(mode="json")), setting.loaded.path
    log = RunLog.start(setting.store.root, recipe.name, digest, _named(plan), file if file.is_file() else None)
    steps: list[StageStep] = []
    verdict: Verdict | None = None
    stopped: str | None = None
    remaining = list(plan)
    try:
        with Servers(setting, reporter) as servers:
            run = _StageRunner(setting, reporter, servers, redo)
            while remaining:
                planned = remaining.pop(0)
                if planned.stage.releases and verdict is not Verdict.PASS:
                    if not remaining:
                        reporter.say(f"not published: the verdict is {verdict.value if verdict else 'missing'}")
                    continue
                run.expect(remaining)
                step = run.step(planned, len(steps) + 1, len(steps) + 1 + len(remaining))
                steps.append(step)
                planned.stage.require_sound(step.entry)
                verdict = planned.stage.verdict(step.entry) or verdict
                if planned.stage.stops(step.entry):
                    servers.stop()
                    stopped = planned.key
                    plan = after_stop(plan, setting)
                    log.replan(_named(plan))
                    remaining = [planned for planned in plan if planned.key not in run.entries]
                    reporter.say(f"stopped by {stopped}: nothing more is measured, and nothing published")
    except BaseException as error:
        _log_end(log, error)
        raise
    outcome = RunOutcome(tuple(steps), verdict, log.run.id, stopped)
    facts: dict[str, object] = {} if stopped is None else {"stopped": stopped}
    facts["stages"] = {
        step.planned.key: {
            "cached": step.cached,
            "seconds": round(step.seconds, 1),
            "fingerprint": step.planned.fingerprint,
        }
        for step in steps
    }
    log.finish(None if verdict is None else verdict.value, outcome.exit_code, facts=facts)
    return outcome


def _named(plan: Sequence[Planned]) -> list[tuple[str, str]]:
    return [(planned.family, planned.fingerprint) for planned in plan]


@dataclass(frozen=True, slots=True)
class _StageRunner:
    """Runs single stages for `run_plan`; ``entries`` are those of the finished stages, by key."""

    setting: Setting
    reporter: Reporter
    servers: Servers
    redo: Collection[str]
    entries: dict[str, Entry] = field(default_factory=dict)

    def step(self, planned: Planned, number: int, total: int) -> StageStep:
        """Find the stage's entry or make it, and send it to the remote tier if there is one.

        ``number`` of ``total`` is for messages. An error that is no `QuantmintError` is raised as one.
        """
        setting, reporter = self.setting, self.reporter
        again = planned.among(self.redo)
        entry, cached, seconds = None if again else find_entry(planned, setting), True, 0.0
        if entry is not None:
            reporter.cached(planned.key, number, total, str(entry.record.result.get("summary", "")))
        else:
            reporter.started(planned.key, number, total)
            began = time.monotonic()
            try:
                entry, cached = self._make_entry(planned, again)
            except QuantmintError:
                raise
            except Exception as error:
                if "KeyboardInterrupt" in str(error):  # pydantic's word for Ctrl-C while a class of its is read
                    raise KeyboardInterrupt from error
                raise _worded(planned, error) from error
            seconds = time.monotonic() - began
            reporter.finished(planned.key, number, total, seconds, str(entry.record.result.get("summary", "")))
        if setting.remote is not None:
            setting.remote.send(entry, self._inputs(planned), reporter)
        self.entries[planned.key] = entry
        return StageStep(planned, entry, cached, seconds)

    def expect(self, remaining: Sequence[Planned]) -> None:
        """Announce the next side that ``remaining`` stages serve, if its model exists, to start its server early."""
        for planned in remaining:
            stage, model = planned.stage, self.entries.get(planned.inputs.get("model", ""))
            if isinstance(stage, ServeStage) and model is not None and find_entry(planned, self.setting) is None:
                self.servers.expect(stage.side, launch_plan(self.setting, stage.side, model_folder(model)))
                return

    def _inputs(self, planned: Planned) -> dict[str, Entry]:
        return {name: self.entries[key] for name, key in planned.inputs.items()}

    def _make_entry(self, planned: Planned, again: bool) -> tuple[Entry, bool]:
        stage, setting, reporter = planned.stage, self.setting, self.reporter
        started = datetime.now(UTC)
        existing = setting.store.find(stage.family, planned.fingerprint)
        if existing is not None and (again or not stage.intact(existing, setting)):
            setting.store.retire(existing)
        with setting.store.working(
            stage.family, planned.fingerprint, on_wait=lambda holder: reporter.say(f"waiting for {holder}")
        ) as work:
            if work.existing is not None:
                return work.existing, True
            inputs = self._inputs(planned)
            if setting.remote is not None and not again:
                brought = setting.remote.bring(work, inputs, reporter)
                if brought is not None:
                    return brought, True
            output = stage.run(Job(setting, work.path, inputs, reporter, self.servers, again))
            entry = work.commit(
                payload=planned.payload,
                result={**output.result, "summary": output.summary},
                started=started,
                tools=dict(stage.tools(setting)),
                hashed=output.known,
            )
            return entry, False


def _worded(planned: Planned, error: Exception) -> QuantmintError:
    """Return a `QuantmintError` for another error of a stage; a measuring stage's makes the run INVALID."""
    if isinstance(error, MeasurementError | DefinitionError) and planned.stage.measures:
        return InvalidMeasurementError(f"{planned.key}: {error}")
    if isinstance(error, CalibrationError):
        return StageError(f"{planned.key}: {error}", transient=is_transient(error))
    return StageError(
        f"stage {planned.key} broke: {type(error).__name__}: {error}",
        hint="Run with --debug for the traceback; the same command goes on after the last finished stage.",
        transient=is_transient(error),
    )


def _log_end(log: RunLog, error: BaseException) -> None:
    """Record a run's error and exit code; errors of the store are ignored, so that they do not hide this one."""
    message, code = str(error), 5
    if isinstance(error, QuantmintError):
        message, code = error.message, error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", error.exit_code if isinstance(error, TerminatedError) else 130
    with suppress(StoreError):
        log.finish(None, code, facts={"error": message})
