"""quantmint judge GATE_JSON"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option


@click.command(name="judge")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def command(path: Path, as_json: bool) -> int:
    """Judge again from the numbers in PATH, a gate.json or the folder of a published checkpoint.

    Ends with the verdict's exit code.
    """
    from eval.errors import MeasurementError
    from eval.record import rejudge
    from pipeline.errors import UserError
    from pipeline.stages.gate import GATE
    from pipeline.stages.publish import EVIDENCE

    file = next((p for p in (path / EVIDENCE / GATE, path / GATE) if p.is_file()), path)
    try:
        report = rejudge(file)
    except MeasurementError as error:
        raise UserError(str(error)) from None
    if as_json:
        emit(report.to_json())
    else:
        click.echo(f"{report.verdict.value}  {report.artefact}")
        for finding in report.findings:
            click.echo(f"  {finding.verdict.value:<12} {finding.kind}: {finding.reason}")
    return report.verdict.exit_code
