"""Datasets of the Hub at a commit: a branch moves, and ranges must say which rows they were measured on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from calibration.errors import CalibrationError
from calibration.sets import CalibrationSet

_COMMIT = re.compile(r"[0-9a-f]{40}")


def at_commit(chosen: CalibrationSet, commit_of: Callable[[str, str], str] | None = None) -> CalibrationSet:
    """The set with its revision as a commit; a file, or what is a commit already, as it is.

    ``commit_of`` is asked for a repository and a revision (None: `dataset_commit`). Raises `CalibrationError` where the
    Hub cannot be asked: rows of a branch that may have moved would be measured under a name that says nothing.
    """
    if chosen.repo is None or chosen.revision is None or _COMMIT.fullmatch(chosen.revision):
        return chosen
    return replace(chosen, revision=(commit_of or dataset_commit)(chosen.repo, chosen.revision))


@cache
def dataset_commit(repo: str, revision: str) -> str:
    """The commit of a data set's revision: within one process a branch stays where it was first found.

    Raises `CalibrationError` where the Hub cannot be asked.
    """
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
