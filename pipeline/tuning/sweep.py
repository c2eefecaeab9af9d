"""A sweep: trial after trial until everything was tried or the budget is used up.

What is done is read from the store, in the order in which it would be done; so a sweep that was killed goes on where it
was, and one with more knobs takes over the trials that are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.canonical import fingerprint
from pipeline.errors import ServingError, UserError
from pipeline.progress import Reporter
from pipeline.tuning import order
from pipeline.tuning.budget import Budget, duration
from pipeline.tuning.measure import STARTUP_TIMEOUT_S, Deadline, Launch, OutOfTimeError, measure
from pipeline.tuning.objective import Judge, Objective
from pipeline.tuning.order import Design
from pipeline.tuning.results import Outcome
from pipeline.tuning.space import BASE, Point, Trial, label
from pipeline.tuning.subject import Subject
from pipeline.tuning.trials import Trials


@dataclass
class Sweep:
    """A sweep as far as it got. ``refused`` are points that the planner would not plan, with its reason."""

    subject: Subject
    design: Design
    objective: Objective
    outcomes: dict[Trial, Outcome] = field(default_factory=dict)
    refused: dict[Point, str] = field(default_factory=dict)
    not_tried: list[Point] = field(default_factory=list)
    out_of_time: bool = False

    @property
    def judge(self) -> Judge:
        """Compares what was measured so far."""
        return Judge(self.outcomes, self.objective)

    @property
    def id(self) -> str:
        """What makes two runs the same sweep: all but its budget and its objective."""
        return fingerprint(
            {
                "base": self.subject.payload(Trial(BASE)),
                "knobs": [[axis.knob, list(axis.values)] for axis in self.design.axes],
                "mode": self.design.mode,
                "keep": self.design.keep,
                "repeat": self.design.repeat,
            }
        )


def planned(sweep: Sweep) -> list[Trial]:
    """Every trial that is known before anything was measured: all but what depends on results."""
    fixed = order.Design(sweep.design.axes, sweep.design.mode, keep=False, repeat=sweep.design.repeat)
    return [*order.exploring(fixed, lambda points: points[0]), *order.closing(sweep.design)]


def run_sweep(
    sweep: Sweep, trials: Trials, budget: Budget, reporter: Reporter, launch: Launch, *, redo: bool = False
) -> None:
    """Fill ``sweep`` with outcomes.

    ``redo`` measures again what the store has.

    Raises ServingError where the base plan itself does not serve: nothing could be compared with it.
    """
    runner = _Runner(sweep, trials, budget, reporter, launch, redo)
    choose = sweep.judge.choose
    tried = runner.through(order.exploring(sweep.design, choose), reserve=1)
    runner.through(order.closing(sweep.design), reserve=0)
    if tried:
        runner.through(order.together(sweep.design, choose), reserve=0)
    measured = {trial.point for trial in sweep.outcomes}
    wanted = [trial.point for trial in planned(sweep)]
    if sweep.design.keep and sweep.design.mode == "one-at-a-time":
        met = {change for point in measured for change in point}
        wanted = [point for point in wanted if not set(point) <= met]
    sweep.not_tried += [
        point for point in dict.fromkeys(wanted) if point not in measured and point not in sweep.refused
    ]
    sweep.not_tried += [point for point in runner.cut if point not in measured and point not in sweep.not_tried]


class _Runner:
    def __init__(
        self, sweep: Sweep, trials: Trials, budget: Budget, reporter: Reporter, launch: Launch, redo: bool
    ) -> None:
        self.sweep, self.trials, self.budget, self.reporter = sweep, trials, budget, reporter
        self.launch, self.redo = launch, redo
        self.id = sweep.id
        self.total = len(planned(sweep))
        self.number = 0
        self.cut: list[Point] = []

    def through(self, wanted: Iterable[Trial], *, reserve: int) -> bool:
        """Run trials until one is not affordable with ``reserve`` more after it; whether all were run."""
        for trial in wanted:
            if trial in self.sweep.outcomes or trial.point in self.sweep.refused:
                continue
            if not self._one(trial, reserve):
                self.cut.append(trial.point)
                return False
        return True

    def _one(self, trial: Trial, reserve: int) -> bool:
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
        known = None if self.redo else self.trials.find(trial)
        if known is not None:
            if known.sweep == self.id:
                self.budget.earlier(known.seconds)
            self._keep(trial, known)
            self.reporter.cached(name, self.number, self.total, summary(known))
            return True
        if not self.budget.affords(1 + reserve):
            self._stop()
            return False
        if self.redo:
            self.trials.forget(trial)
        self.reporter.started(name, self.number, self.total)
        base_start = self._base_start()
        try:
            outcome = self.trials.make(
                trial,
                lambda work: self._checked(
                    trial,
                    measure(
                        self.sweep.subject,
                        plan,
                        work.path,
                        log=self.trials.log,
                        launch=self.launch,
                        sweep=self.id,
                        deadline=Deadline(self.budget.left),
                        startup_timeout=STARTUP_TIMEOUT_S if base_start is None else 300 + 4 * base_start,
                        progress=self.reporter,
                    ),
                ),
            )
        except OutOfTimeError:
            self._stop(f"the budget ended during {name}, which does not count")
            return False
        self._keep(trial, outcome)
        if outcome.status != "ok":
            self.reporter.warn(f"{name}: {outcome.why}")
        self.reporter.finished(name, self.number, self.total, outcome.seconds, summary(outcome))
        return True

    def _checked(self, trial: Trial, outcome: Outcome) -> Outcome:
        if trial.point == BASE and outcome.status != "ok":
            raise ServingError(
                f"the base plan cannot be measured, and everything is compared with it: {outcome.why}", hint=outcome.fix
            )
        return outcome

    def _keep(self, trial: Trial, outcome: Outcome) -> None:
        self.sweep.outcomes[trial] = outcome
        if outcome.status != "failed":
            self.budget.seen(outcome.seconds)

    def _base_start(self) -> float | None:
        return next((o.started_seconds for t, o in self.sweep.outcomes.items() if t.point == BASE), None)

    def _stop(self, why: str | None = None) -> None:
        if not self.sweep.out_of_time:
            spent, whole = duration(self.budget.spent), duration(self.budget.seconds or 0)
            expected = duration(self.budget.expected)
            self.reporter.warn(
                why or f"{spent} of {whole} are spent, a trial takes about {expected}: the budget is used up"
            )
        self.sweep.out_of_time = True


def summary(outcome: Outcome) -> str:
    """One line about a trial."""
    if outcome.status != "ok":
        return f"{outcome.status}: {outcome.why}"
    parts = [
        f"{cell.output_throughput:,.0f} tok/s, TTFT p99 {cell.ttft_p99:,.0f} ms" for cell in outcome.cells.values()
    ]
    return "; ".join(parts)
