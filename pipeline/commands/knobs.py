"""quantmint knobs"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option


@click.command(name="knobs")
@click.argument("name", required=False)
@click.option("--vllm", "version", help="Only what this version of vLLM has; with NAME, whether it has it.")
@click.option(
    "--markdown",
    "document",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write the documentation's page of knobs into this file; - prints it.",
)
@json_option
def command(name: str | None, version: str | None, document: Path | None, as_json: bool) -> int:
    """List what a launch of vLLM can set, or say of one NAME when it gets which value, and why."""
    from pipeline.serving.environment import parse_version
    from pipeline.serving.knobs.page import conditions, entry, existence, page, versions
    from pipeline.serving.knobs.table import Knob, knob, table

    def plain(item: Knob) -> dict[str, object]:
        found: dict[str, object] = {
            "name": item.name,
            "kind": item.kind,
            "topic": item.topic,
            "about": item.about,
            "versions": existence(item),
            "default": item.default,
            "replaces": item.replaces,
            "sweep": item.sweep,
            "guides": item.guides,
            "disagreement": item.disagreement,
            "never": item.never,
            "rules": [
                {
                    "value": rule.value,
                    "when": conditions(rule),
                    "versions": versions(rule.first, rule.end),
                    "why": rule.why,
                    "source": rule.source,
                }
                for rule in item.rules
            ],
        }
        if version is not None:
            found["known"] = item.known(parse_version(version))
        return found

    if document is not None:
        if str(document) == "-":
            click.echo(page(), nl=False)
            return 0
        try:
            document.write_text(page(), encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"--markdown: {document}: {error.strerror}") from None
        click.echo(f"{document}: written")
        return 0
    if name is not None:
        found = knob(name)
        if as_json:
            emit(plain(found))
            return 0
        click.echo(entry(found))
        if version is not None and not found.known(parse_version(version)):
            click.echo(f"\nvLLM {version} does not have it.")
        return 0
    number = None if version is None else parse_version(version)
    shown = [item for item in table().values() if number is None or item.known(number)]
    if as_json:
        emit([plain(item) for item in shown])
        return 0
    from rich.console import Console

    from pipeline.commands.tables import table as make

    rows = make("knob", "kind", "vLLM", "what it does")
    for item in shown:
        rows.add_row(item.name, item.kind, existence(item), item.about)
    Console(highlight=False).print(rows)
    return 0
