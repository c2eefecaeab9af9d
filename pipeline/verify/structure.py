"""Whether the tensors are what config.json says of them: the inspection, of a folder or of headers alone."""

from __future__ import annotations

from pipeline.errors import UserError
from pipeline.formats.layout import layout_of
from pipeline.inspection.findings import Finding
from pipeline.inspection.inspect import inspect_checkpoint
from pipeline.inspection.structure import check_structure
from pipeline.verify.check import Check, fails, judged, not_checked
from pipeline.verify.model import UnknownModelError
from pipeline.verify.subject import Subject

NAME = "structure"


def check(subject: Subject) -> Check:
    """Inspect the checkpoint as `quantmint inspect` does; where only headers were fetched, those."""
    try:
        checkpoint, structure = subject.model
        form = layout_of(checkpoint.config)
        if subject.vouched:
            modules = [*structure.linear, *structure.kept]
            claims = form.claims(checkpoint.config["quantization_config"], modules)
            found = [_told(finding) for finding in check_structure(checkpoint, structure, claims)]
            if found:
                return fails(NAME, *found)
            reason = f"the headers of {len(checkpoint.tensors)} tensors are right; their numbers were not fetched"
            return not_checked(NAME, reason, "without --remote they are fetched and checked")
        with subject.progress.bar(checkpoint.nbytes, "B") as advance:
            inspection = inspect_checkpoint(checkpoint, structure, advance=advance)
    except UnknownModelError as error:
        return not_checked(NAME, error.message)
    except UserError as error:
        return fails(NAME, error.message)
    return judged(NAME, list(map(_told, inspection.findings)), f"{form.name}: {inspection.summary()}")


def _told(finding: Finding) -> str:
    return f"{finding.rule}: {finding.where}: {finding.message}"
