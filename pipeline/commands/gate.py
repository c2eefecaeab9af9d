"""quantmint gate PATH_OR_RECIPE"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option, store_option

if TYPE_CHECKING:
    from eval.gate import Policy
    from pipeline.store.tree import Store

_FRACTION = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command(name="gate")
@click.argument("subject", metavar="PATH_OR_RECIPE")
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
@store_option
@json_option
def command(
    subject: str,
    margin: float | None,
    confidence: float | None,
    min_ratio: float | None,
    store_path: Path,
    as_json: bool,
) -> int:
    """Judge again from the recorded numbers, by the recorded limits or by your own.

    PATH_OR_RECIPE is a published folder, a gate.json or its folder, a report in the store, the name of a recipe that
    was run, or a release elsewhere (org/name[@TAG], s3://bucket/prefix/name[@TAG]), of which only the evidence is
    fetched. Nothing of the recorded verdict is used; whether it is the same is said. Ends with the verdict's exit code.
    """
    from eval import record
    from eval.errors import MeasurementError
    from eval.gate import changes, judge
    from pipeline.commands.judgement import print_judgement
    from pipeline.errors import UserError
    from pipeline.store.tree import Store

    file = _record_of(subject, Store(store_path), as_json=as_json)
    try:
        measurements, recorded = record.read(file)
    except MeasurementError as error:
        hint = "A record is a gate.json with the samples/ that were written beside it."
        raise UserError(str(error), hint=hint) from None
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


def _record_of(subject: str, store: Store, *, as_json: bool) -> Path:
    """The record that a person named. Raises `UserError` where there is none."""
    from eval.report.model import DATA
    from pipeline import finished
    from pipeline.errors import UserError
    from pipeline.progress import reporter_for
    from pipeline.publish.release import EVIDENCE
    from pipeline.stages.gate import GATE
    from pipeline.verify.place import record_of

    elsewhere = record_of(subject, reporter_for(json=as_json))
    path = Path(subject) if elsewhere is None else elsewhere
    if path.is_file() and path.name != DATA:
        return path
    places = [path / GATE, path / EVIDENCE / GATE]
    found = next((place for place in places if place.is_file()), None)
    if found is None and not (path.is_dir() and not (path / DATA).is_file()):
        found = finished.find(subject, store).gate
    if found is None:
        hint = "quantmint writes one into stage gate's entry of the store, and beside what it publishes."
        raise UserError(f"{subject}: found no {GATE}, neither there nor in {EVIDENCE}/.", hint=hint)
    return found


def _own(policy: Policy, margin: float | None, confidence: float | None, min_ratio: float | None) -> Policy:
    if margin is not None:
        policy = replace(policy, margins=dict.fromkeys(policy.margins, margin))
    if confidence is not None:
        policy = replace(policy, confidence=confidence, throughput_confidence=confidence)
    return policy if min_ratio is None else replace(policy, min_ratio=min_ratio)
