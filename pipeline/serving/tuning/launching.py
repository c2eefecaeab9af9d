"""The launches of a sweep: which come next, what of them the store has, and what the budget still affords."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quantmint.eval.report.numbers import duration
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.serving.tuning.contest import Contest, contest_of
from quantmint.pipeline.serving.tuning.space import BASE, STAGE, Point, SweepTrial, label
from quantmint.pipeline.serving.tuning.sweep import KnobSweep, planned
from quantmint.pipeline.serving.tuning.trials import STARTUP_TIMEOUT_S, Budget, OutOfTimeError, TrialResult, once
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.tree import Store

_PROOF = 2 * contest_of([BASE], None).launches
"""Launches of the smallest contest, which a budget keeps back while values are screened."""


def run_sweep(sweep: KnobSweep, store: Store, budget: Budget, reporter: Reporter, *, redo: bool = False) -> None:
    """Fill ``sweep``; ``redo`` measures what the store has again. ServingError where the base plan does not serve."""
    runner = _Runner(sweep, store, budget, reporter, redo)
    *wanted, closing = planned(sweep.design)
    complete = runner.through(wanted, reserve=1 + _PROOF)
    runner.through([closing], reserve=0)
    points = [trial.point for trial in wanted]
    if sweep.score(BASE) is not None:
        sweep.contest = runner.contest(sweep.finalists())
        if sweep.contest is not None:
            points += sweep.contest.points
            runner.through(sweep.contest.trials(), reserve=0)
    # A base plan that breaks a limit is no rival: what keeps it needs no proof, and the winners are measured once.
    elif complete and sweep.design.mode == "one-at-a-time" and len(winner := sweep.winners()) > 1:
        points.append(winner)
        runner.through([SweepTrial(winner, run) for run in range(sweep.design.repeat)], reserve=0)
    met = {trial.point for trial in sweep.outcomes} | set(sweep.refused)
    sweep.not_tried += [point for point in dict.fromkeys(points) if point not in met]


class _Runner:
    def __init__(self, sweep: KnobSweep, store: Store, budget: Budget, reporter: Reporter, redo: bool) -> None:
        self.sweep, self.store, self.budget, self.reporter, self.redo = sweep, store, budget, reporter, redo
        self.id = sweep.id
        self.total = len(planned(sweep.design))
        self.number = 0

    def through(self, wanted: Iterable[SweepTrial], *, reserve: int) -> bool:
        """Run trials until one is not affordable with ``reserve`` more after it; whether all were run."""
        return all(
            trial in self.sweep.outcomes or trial.point in self.sweep.refused or self._one(trial, reserve)
            for trial in wanted
        )

    def contest(self, finalists: Sequence[Point]) -> Contest | None:
        """The contest of as many finalists as the budget affords; None without any, or where it affords none."""
        finalists = [point for point in finalists if self._plannable(point)]
        for count in range(len(finalists), 0, -1):
            contest = contest_of(finalists[:count], self.sweep.design.launches)
            missing = sum(self._entry(trial) is None or self.redo for trial in contest.trials())
            if not missing or self.budget.affords(missing):
                self.total = self.number + len(contest.trials())
                return contest
        if finalists:
            self._stop(f"the budget has no room to hold {label(finalists[0])} against the base plan: nothing is proven")
        return None

    def _plannable(self, point: Point) -> bool:
        try:
            self.sweep.subject.plan(point)
        except UserError as error:
            self.sweep.refused[point] = error.message
            self.reporter.warn(f"{label(point)}: {error.message}")
            return False
        return True

    def _entry(self, trial: SweepTrial) -> Entry | None:
        return self.store.find(STAGE, self.sweep.subject.fingerprint(trial))

    def _one(self, trial: SweepTrial, reserve: int) -> bool:
        if trial.contest:
            name = f"{label(trial.point)}, turn {trial.run + 1}"
        else:
            name = label(trial.point) + (f", run {trial.run + 1}" if trial.run else "")
        try:
            plan = self.sweep.subject.plan(trial.point)
        except UserError as error:
            if trial.point == BASE:
                raise
            self.sweep.refused[trial.point] = error.message
            self.reporter.warn(f"{name}: {error.message}")
            return True
        self.number += 1
        self.total = max(self.total, self.number)
        payload = self.sweep.subject.payload(trial)
        entry = self.store.find(STAGE, fingerprint(payload))
        if entry is not None and not self.redo:
            known = TrialResult.from_json(entry.record.result)
            if known.sweep == self.id:
                self.budget.earlier += known.seconds
            self._keep(trial, known)
            self.reporter.cached(name, self.number, self.total, summary(known))
            return True
        if not self.budget.affords(1 + reserve):
            self._stop(reserve=reserve)
            return False
        if entry is not None:
            self.store.retire(entry)
        self.reporter.started(name, self.number, self.total)
        outcomes = self.sweep.outcomes.items()
        base_start = next((done.started_seconds for one, done in outcomes if one.point == BASE), None)

        def check(outcome: TrialResult, _: Path) -> None:
            if trial.point == BASE and outcome.status != "ok":
                why = f"the base plan cannot be measured, and everything is compared with it: {outcome.why}"
                raise ServingError(why, hint=outcome.fix)

        timeout = STARTUP_TIMEOUT_S if base_start is None else 300 + 4 * base_start
        how: dict[str, Any] = {"sweep": self.id, "budget": self.budget, "startup_timeout": timeout}
        try:
            subject, reporter = self.sweep.subject, self.reporter
            told, _ = once(subject, self.store, payload, lambda _: plan, check, progress=reporter, **how)
            outcome = TrialResult.from_json(told)
        except OutOfTimeError:
            self._stop(f"the budget ended during {name}, which does not count")
            return False
        self._keep(trial, outcome)
        if outcome.status != "ok":
            self.reporter.warn(f"{name}: {outcome.why}")
        self.reporter.finished(name, self.number, self.total, outcome.seconds, summary(outcome))
        return True

    def _keep(self, trial: SweepTrial, outcome: TrialResult) -> None:
        self.sweep.outcomes[trial] = outcome
        if outcome.status != "failed":
            self.budget.longest = max(self.budget.longest, outcome.seconds)

    def _stop(self, why: str | None = None, *, reserve: int = 0) -> None:
        if why is not None or not self.sweep.out_of_time:
            spent, whole = duration(self.budget.spent), duration(self.budget.seconds or 0)
            expected = duration(self.budget.expected)
            rest = f", but for {reserve} that decide" if reserve > 1 else ""
            self.reporter.warn(
                why or f"{spent} of {whole} are spent, a trial takes about {expected}: the budget is used up{rest}"
            )
        self.sweep.out_of_time = True


def summary(outcome: TrialResult) -> str:
    """One line about a trial."""
    if outcome.status != "ok":
        return f"{outcome.status}: {outcome.why}"
    parts = [
        f"{cell.output_throughput:,.0f} tok/s, TTFT p99 {cell.ttft_p99:,.0f} ms" for cell in outcome.cells.values()
    ]
    return "; ".join(parts)
