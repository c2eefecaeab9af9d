"""Run the trials of a sweep: take them from the store or measure them, in order, within the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from quantmint.eval.report.numbers import duration
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.tuning.contest import Contest, contest_of
from quantmint.pipeline.serving.tuning.space import BASE, Point, SweepTrial, label
from quantmint.pipeline.serving.tuning.subject import STAGE
from quantmint.pipeline.serving.tuning.sweep import KnobSweep, screening_trials
from quantmint.pipeline.serving.tuning.trials import (
    STARTUP_TIMEOUT_S,
    Budget,
    OutOfTimeError,
    TrialLimits,
    TrialResult,
    measure_stored,
)
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.tree import Store

_SMALLEST_CONTEST = 2 * contest_of([BASE], None).launches
"""Launches of the smallest contest, for which the screening leaves time in the budget."""


def run_sweep(sweep: KnobSweep, store: Store, budget: Budget, reporter: Reporter, *, redo: bool = False) -> None:
    """Run a sweep and record its results in ``sweep``; ``redo`` measures again what the store has.

    Raises `ServingError` when the base plan cannot be measured.
    """
    runner = _Runner(sweep, store, budget, reporter, redo)
    *screening, closing = screening_trials(sweep.design)
    complete = runner.run_trials(screening, reserve=1 + _SMALLEST_CONTEST)
    runner.run_trials([closing], reserve=0)
    points = [trial.point for trial in screening]
    if sweep.score(BASE) is not None:
        sweep.contest = runner.contest(sweep.finalists())
        if sweep.contest is not None:
            points += sweep.contest.points
            runner.run_trials(sweep.contest.trials(), reserve=0)
    # A base plan that breaks a limit is no alternative, so a plan that keeps it needs no contest: the combined winners
    # are measured once.
    elif complete and sweep.design.mode == "one-at-a-time" and len(winners := sweep.winners()) > 1:
        points.append(winners)
        runner.run_trials([SweepTrial(winners, run) for run in range(sweep.design.repeat)], reserve=0)
    tried = {trial.point for trial in sweep.results} | set(sweep.refused)
    sweep.not_tried += [point for point in dict.fromkeys(points) if point not in tried]


class _Runner:
    def __init__(self, sweep: KnobSweep, store: Store, budget: Budget, reporter: Reporter, redo: bool) -> None:
        self.sweep, self.store, self.budget, self.reporter, self.redo = sweep, store, budget, reporter, redo
        self.id = sweep.id
        self.total = len(screening_trials(sweep.design))
        self.number = 0

    def run_trials(self, trials: Iterable[SweepTrial], *, reserve: int) -> bool:
        """Run trials until the budget does not afford one and ``reserve`` more; return whether all were run."""
        return all(
            trial in self.sweep.results or trial.point in self.sweep.refused or self._run_trial(trial, reserve)
            for trial in trials
        )

    def contest(self, finalists: Sequence[Point]) -> Contest | None:
        """Return the contest of as many finalists as the budget affords; None without any."""
        finalists = [point for point in finalists if self._plan(point, label(point)) is not None]
        for count in range(len(finalists), 0, -1):
            contest = contest_of(finalists[:count], self.sweep.design.launches)
            missing = sum(self._entry(trial) is None or self.redo for trial in contest.trials())
            if not missing or self.budget.affords(missing):
                self.total = self.number + len(contest.trials())
                return contest
        if finalists:
            self._stop(f"the budget has no time to compare {label(finalists[0])} with the base plan: nothing is proven")
        return None

    def _plan(self, point: Point, name: str) -> LaunchPlan | None:
        """Return a point's plan; None, with a warning, when the planner refuses it.

        Raises `UserError` for the base plan.
        """
        try:
            return self.sweep.subject.plan(point)
        except UserError as error:
            if point == BASE:
                raise
            self.sweep.refused[point] = error.message
            self.reporter.warn(f"{name}: {error.message}")
            return None

    def _entry(self, trial: SweepTrial) -> Entry | None:
        return self.store.find(STAGE, self.sweep.subject.fingerprint(trial))

    def _run_trial(self, trial: SweepTrial, reserve: int) -> bool:
        """Take a trial from the store or measure it, unless its plan is refused.

        Return False when the budget is spent.
        """
        name = _trial_name(trial)
        plan = self._plan(trial.point, name)
        if plan is None:
            return True
        self.number += 1
        self.total = max(self.total, self.number)
        payload = self.sweep.subject.payload(trial)
        entry = self.store.find(STAGE, fingerprint(payload))
        if entry is not None and not self.redo:
            stored = TrialResult.from_json(entry.record.result)
            if stored.sweep == self.id:
                self.budget.earlier += stored.seconds
            self._add(trial, stored)
            self.reporter.cached(name, self.number, self.total, trial_words(stored))
            return True
        if not self.budget.affords(1 + reserve):
            self._stop(reserve=reserve)
            return False
        if entry is not None:
            self.store.retire(entry)
        self.reporter.started(name, self.number, self.total)
        try:
            result = self._measure(trial, plan, payload)
        except OutOfTimeError:
            self._stop(f"the budget ended during {name}, which does not count")
            return False
        self._add(trial, result)
        if result.status != "ok":
            self.reporter.warn(f"{name}: {result.why}")
        self.reporter.finished(name, self.number, self.total, result.seconds, trial_words(result))
        return True

    def _measure(self, trial: SweepTrial, plan: LaunchPlan, payload: dict[str, object]) -> TrialResult:
        base_starts = [result.started_seconds for done, result in self.sweep.results.items() if done.point == BASE]
        base_start = next(iter(base_starts), None)

        def check(result: TrialResult, _: Path) -> None:
            if trial.point == BASE and result.status != "ok":
                why = f"the base plan cannot be measured, so no plan can be compared with it: {result.why}"
                raise ServingError(why, hint=result.fix)

        timeout = STARTUP_TIMEOUT_S if base_start is None else 300 + 4 * base_start
        limits = TrialLimits(self.id, self.budget, timeout)
        subject = self.sweep.subject
        result, _ = measure_stored(subject, self.store, payload, lambda _: plan, check, limits, self.reporter)
        return result

    def _add(self, trial: SweepTrial, result: TrialResult) -> None:
        self.sweep.results[trial] = result
        if result.status != "failed":
            self.budget.longest = max(self.budget.longest, result.seconds)

    def _stop(self, why: str | None = None, *, reserve: int = 0) -> None:
        if why is not None or not self.sweep.out_of_time:
            spent, total = duration(self.budget.spent), duration(self.budget.seconds or 0)
            expected = duration(self.budget.expected)
            reserved = f", except for {reserve} launches that decide" if reserve > 1 else ""
            self.reporter.warn(
                why
                or f"{spent} of {total} are spent, and a trial takes about {expected}: the budget is used up{reserved}"
            )
        self.sweep.out_of_time = True


def _trial_name(trial: SweepTrial) -> str:
    if trial.contest:
        return f"{label(trial.point)}, turn {trial.run + 1}"
    return label(trial.point) + (f", run {trial.run + 1}" if trial.run else "")


def trial_words(result: TrialResult) -> str:
    """Return one line about a result: throughput and latency of each cell, or why it failed."""
    if result.status != "ok":
        return f"{result.status}: {result.why}"
    parts = [f"{cell.output_throughput:,.0f} tok/s, TTFT p99 {cell.ttft_p99:,.0f} ms" for cell in result.cells.values()]
    return "; ".join(parts)
