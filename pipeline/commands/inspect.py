"""quantmint inspect PATH"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option


@click.command(name="inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    help="The 16-bit model: measures the error of every layer and compares what was not quantized.",
)
@click.option("--allow-unit-kv-scales", is_flag=True, help="Accept KV scales of exactly 1.0.")
@json_option
def command(path: Path, source: Path | None, allow_unit_kv_scales: bool, as_json: bool) -> int:
    """Prove that the compressed-tensors or Quark checkpoint in PATH is what its config.json says.

    Ends with 0 when nothing contradicts anything, with 1 when something does.
    """
    from pipeline.formats.checkpoint import open_checkpoint
    from pipeline.formats.layout import layout_of
    from pipeline.inspection.inspect import inspect_checkpoint
    from pipeline.model.structure import read_structure
    from pipeline.progress import reporter_for

    checkpoint = open_checkpoint(path)
    layout_of(checkpoint.config)
    original = None if source is None else open_checkpoint(source)
    structure = read_structure(path, checkpoint.tensors)
    with reporter_for(json=as_json).bar(checkpoint.nbytes, "B") as advance:
        inspection = inspect_checkpoint(
            checkpoint, structure, source=original, allow_unit_kv_scales=allow_unit_kv_scales, advance=advance
        )
    if as_json:
        emit(inspection.to_json())
    else:
        click.echo(f"{'PASS' if inspection.passed else 'FAIL'}  {path} ({inspection.checkpoint_format})")
        click.echo(inspection.summary())
    return 0 if inspection.passed else 1
