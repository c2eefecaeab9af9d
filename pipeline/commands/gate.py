"""quantmint gate PATH"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option

if TYPE_CHECKING:
    from eval.gate import Policy

_FRACTION = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command(name="gate")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--margin", type=_FRACTION, help="Judge by this margin on every gated task; 0.01 is one point.")
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, max_open=True),
    help="Judge at this confidence, of accuracy and of throughput.",
)
@click.option(
    "--min-ratio",
    type=click.FloatRange(0, min_open=True),
    help="Judge by this ratio to the baseline's output tokens/s.",
)
@json_option
def command(path: Path, margin: float | None, confidence: float | None, min_ratio: float | None, as_json: bool) -> int:
    """Judge again from the numbers in PATH: a gate.json, its folder, or a published checkpoint.

    Nothing of the recorded verdict is used; whether it is the same is said. Ends with the verdict's exit code.
    """
    from eval import record
    from eval.errors import MeasurementError
    from eval.gate import judge
    from eval.gate.changes import changes
    from pipeline.commands.judgement import print_judgement
    from pipeline.errors import UserError

    file = _record_in(path)
    try:
        measurements, recorded = record.read(file)
    except MeasurementError as error:
        raise UserError(str(error)) from None
    policy = _own(recorded.policy, margin, confidence, min_ratio)
    own = policy != recorded.policy
    report = judge(measurements, policy)
    differences = () if own else changes(recorded, report)
    if as_json:
        facts = {
            "path": str(file),
            "judged_by": "your policy" if own else "the recorded policy",
            "recorded": recorded.verdict.value,
            "differences": list(differences),
        }
        emit({**facts, **report.to_json()})
    else:
        print_judgement(report, recorded, file, own=own, differences=differences)
    return report.verdict.exit_code


def _record_in(path: Path) -> Path:
    """The record that a path means. Raises `UserError` for a folder without one."""
    from pipeline.errors import UserError
    from pipeline.stages.gate import GATE
    from pipeline.stages.publish import EVIDENCE

    if not path.is_dir():
        return path
    places = [path / GATE, path / EVIDENCE / GATE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        hint = "quantmint writes one into stage gate's entry of the store, and beside what it publishes."
        raise UserError(f"{path}: found no {GATE}, neither there nor in {EVIDENCE}/.", hint=hint)
    return found


def _own(policy: Policy, margin: float | None, confidence: float | None, min_ratio: float | None) -> Policy:
    if margin is not None:
        policy = replace(policy, margins=dict.fromkeys(policy.margins, margin))
    if confidence is not None:
        policy = replace(policy, confidence=confidence, throughput_confidence=confidence)
    return policy if min_ratio is None else replace(policy, min_ratio=min_ratio)
