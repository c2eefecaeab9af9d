"""Whether what a recipe makes may go where it says, asked before hours of work and not after them.

Rights and terms, as far as they are known before there is a release; the publication asks again.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.errors import UserError
from pipeline.publish.card.base_card import base_metadata
from pipeline.publish.licences import TEXTS, refusal, terms
from pipeline.publish.opening import public_names, targets_of
from pipeline.stage import Setting, SourceIdentity


def require_admission(setting: Setting) -> None:
    """Raise `UserError` where a place of the recipe takes nothing, or the source's licence lets nothing go there."""
    for target in targets_of(setting):
        target.require_access()
    public = public_names(setting.recipe)
    if not public:
        return
    # A card that cannot be had now may be had later; without it, nothing is known and nothing is refused.
    unknown: list[str] = []
    metadata = base_metadata(setting.source, setting.source.folder or Path(), warn=unknown.append)
    names = _names(setting.source)
    if unknown or names is None:
        return
    texts = [name for name in names if any(fnmatchcase(name, pattern) for pattern in TEXTS)]
    found = terms(metadata, texts, setting.recipe.publish.licence)
    for name in public:
        refused = refusal(found, name)
        if refused is not None:
            raise UserError(f"{name} could not be published: {refused}")


def _names(source: SourceIdentity) -> list[str] | None:
    """Names at the top of the source; None where the Hub cannot be asked."""
    if source.folder is not None:
        return [path.name for path in source.folder.iterdir()]
    from huggingface_hub import HfApi

    from pipeline.stages.source import hub_errors

    try:
        return list(HfApi().list_repo_files(str(source.repo), revision=source.digest))
    except hub_errors():
        return None
