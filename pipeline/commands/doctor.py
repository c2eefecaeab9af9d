"""quantmint doctor"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option, vllm_option

if TYPE_CHECKING:
    from pipeline.serving.host.subject import Finding
    from pipeline.serving.planning.target import Target

_MARKS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}


@click.command(name="doctor")
@click.option(
    "--target", help="NAME:GPUS, as in mi300x:8, or auto for what this machine is (default: the recipe's, else auto)."
)
@click.option("--port", type=click.IntRange(1, 65535), help="Port that a server is to listen on.")
@click.option("--model", help="Checkpoint's folder, or a recipe: what its scheme needs is checked too.")
@click.option("--nodes", type=click.IntRange(1), help="Machines like this one that serve together.")
@vllm_option
@json_option
@click.option("--fix-script", is_flag=True, help="Print a bash script of the fixes that need root; nothing is run.")
def command(
    target: str | None,
    port: int | None,
    model: str | None,
    nodes: int | None,
    vllm: str | None,
    as_json: bool,
    fix_script: bool,
) -> int:
    """Check whether this machine is ready to serve: each finding comes with its fix, and nothing is changed.

    Ends with 0 when nothing fails, warnings allowed, with 1 when something does.
    """
    from dataclasses import replace

    from pipeline.base.machine import Machine
    from pipeline.serving.host.checks import examine
    from pipeline.serving.host.subject import look, script, wanted_of
    from pipeline.serving.planning.target import checked, parse_target

    if as_json and fix_script:
        raise click.UsageError("--json and --fix-script both print on standard output: give one of them")
    wanted, meant = (None, None) if model is None else wanted_of(model)
    asked = meant if target is None else None if target == "auto" else parse_target(target)
    if asked is not None and nodes is not None:
        asked = checked(replace(asked, nodes=nodes))
    subject = look(Machine(), target=asked, vllm=vllm, port=port, wanted=wanted, nodes=nodes or 1)
    findings = examine(subject)
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        emit(
            {
                "target": str(subject.target),
                "detected": None if subject.detected is None else subject.detected.to_json(),
                "ready": not failed,
                "findings": [finding.to_json() for finding in findings],
            }
        )
    elif fix_script:
        click.echo(script(findings), nl=False)
    else:
        _print(subject.target, findings)
    return 1 if failed else 0


def _print(target: Target, findings: Sequence[Finding]) -> None:
    """What was seen, then for all that is not well why it matters and what to do."""
    from rich.console import Console
    from rich.markup import escape

    from pipeline.commands.tables import table

    console = Console(highlight=False)
    what = target.hardware if target.accelerator.kind == "cpu" else str(target)
    console.print(f"[bold]{escape(what)}[/]  {escape(target.accelerator.title)}")
    shown = table("check", "status", "found", "expected")
    for column in shown.columns[2:]:
        column.no_wrap = False
    for finding in findings:
        status = f"[{_MARKS[finding.status]}]{finding.status}[/]"
        shown.add_row(finding.name, status, escape(finding.found), escape(finding.expected))
    console.print(shown)
    for finding in findings:
        if finding.fix:
            console.print(f"[{_MARKS[finding.status]}]{finding.name}[/]: {escape(finding.why)}")
            # Commands are copied: no line is broken.
            console.print(f"  {escape(finding.fix)}", soft_wrap=True)
            console.print(f"  [dim]source: {escape(finding.source)}[/]", soft_wrap=True)
    counts = {status: sum(finding.status == status for finding in findings) for status in _MARKS}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
