"""Datasets of the Hub at a commit: a branch moves, and ranges must say which rows they were measured on."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from calibration.errors import CalibrationError
from calibration.sets import CalibrationSet

_COMMIT = re.compile(r"[0-9a-f]{40}")


def at_commit(chosen: CalibrationSet) -> CalibrationSet:
    """The set with its revision as a commit; a file, or what is a commit already, as it is.

    Within one process a branch stays where it was first found. Raises `CalibrationError` where the Hub cannot be
    asked: rows of a branch that may have moved would be measured under a name that says nothing.
    """
    if chosen.repo is None or chosen.revision is None or _COMMIT.fullmatch(chosen.revision):
        return chosen
    return replace(chosen, revision=_commit(chosen.repo, chosen.revision))


@cache
def _commit(repo: str, revision: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    connection = HfHubHTTPError.__bases__[0]  # the root of httpx's errors, or of httpx2's
    try:
        return str(HfApi().dataset_info(repo, revision=revision).sha)
    except (HfHubHTTPError, connection, OfflineModeIsEnabled, RepositoryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CalibrationError(
            f"the dataset {repo}@{revision} cannot be resolved to a commit: {reason} "
            "(without a network, write the 40-digit commit as `revision` of the set)"
        ) from error
