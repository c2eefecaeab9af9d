"""Which commits the branches of the Hub stand for: a plan names commits, and what it names is what is read.

    commits = Commits()
    commits.dataset("openai/gsm8k", "main")    # 40 hex digits, the same for as long as the object lives

Who plans and does not run asks in another way, all at once and not for long (`pipeline.upkeep.due`), and hands in the
answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from calibration.batches import dataset_commit
from calibration.errors import CalibrationError
from pipeline.base.errors import QuantmintError

COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class Commits:
    """Commits of data sets, each asked once: the answer stays, and so does that there was none.

    Else a plan that was made while the Hub was away would be run under a fingerprint that is not what is read.
    """

    def __init__(self, ask: Callable[[str, str], str] = dataset_commit) -> None:
        self._ask = ask
        self._found: dict[tuple[str, str], str | CalibrationError | QuantmintError] = {}

    def dataset(self, repo: str, revision: str) -> str:
        """The commit of a data set's revision. Raises what the Hub's client was told, each time the same."""
        if COMMIT.fullmatch(revision):
            return revision
        key = (repo, revision)
        if key not in self._found:
            try:
                self._found[key] = self._ask(repo, revision)
            except (CalibrationError, QuantmintError) as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, str):
            return found
        raise found
