"""The data sets of the Hub that tasks read, at the commits that a fingerprint names and lm-eval is then given.

Where the Hub cannot be asked, the commits are those that this store's evaluations read last: they are what its cache
holds, and a run that goes on without a network finds what it has measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

from calibration.errors import CalibrationError
from eval.suites import SuiteTask, located
from pipeline.errors import QuantmintError, StoreError
from pipeline.stage import Setting
from pipeline.store.disk import write_atomic

_MEMORY = "dataset-commits.json"


def commits(setting: Setting, task: SuiteTask) -> dict[str, str]:
    """The commit of each data set of a task; one that nobody knows is left out."""
    found: dict[str, str] = {}
    for name in task.data:
        repo, revision = located(name)
        try:
            found[repo] = setting.commits.dataset(repo, revision)
        except (CalibrationError, QuantmintError):
            known = _remembered(setting).get(_key(name))
            if known is not None:
                found[repo] = known
    return found


def settings(setting: Setting, task: SuiteTask) -> dict[str, object]:
    """What of it goes into a fingerprint: nothing for a task whose data is of our own, or at no commit."""
    found = commits(setting, task)
    return {"data": found} if found else {}


def remember(setting: Setting, task: SuiteTask) -> None:
    """Keep the commits of what was read; a store that refuses is told of by what must be written to it."""
    known = _remembered(setting)
    found = commits(setting, task)
    fresh = {_key(name): found[located(name)[0]] for name in task.data if located(name)[0] in found}
    if fresh.items() - known.items():
        path = setting.store.root / _MEMORY
        raw = (json.dumps({**known, **fresh}, indent=1, sort_keys=True) + "\n").encode()
        with suppress(OSError, StoreError):
            write_atomic(path, raw, temporary=path.with_suffix(f".{os.getpid()}.tmp"))


def _key(name: str) -> str:
    return "@".join(located(name))


def _remembered(setting: Setting) -> Mapping[str, str]:
    try:
        memory = json.loads((setting.store.root / _MEMORY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}
