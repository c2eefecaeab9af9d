"""Which data set a task of lm-eval has read, and at which commit."""

from __future__ import annotations

import re
from typing import Any

# `datasets` keeps the address of every file that it fetched, with the commit that it resolved to.
_FILE = re.compile(r"^hf://datasets/(?P<path>[^@]+)@(?P<commit>[0-9a-f]{40})/")
# Builders of `datasets` that read files of ours; our files are in the stage's fingerprint.
_LOCAL = ("json", "csv", "parquet", "text", "arrow")


def dataset_of(task: Any) -> dict[str, str | None] | None:
    """Path, name and commit of a loaded task's data set on the Hub; None for local files.

    lm-eval itself pins and records no commit. What is told is what `datasets` remembers of the download; the commit is
    None where it remembers nothing, and several are joined by a comma.
    """
    path = task.config.dataset_path
    if path is None or path in _LOCAL:
        return None
    commits: set[str] = set()
    splits = task.dataset.values() if isinstance(task.dataset, dict) else ()
    for split in splits:
        for file in (getattr(split, "info", None) and split.info.download_checksums) or ():
            found = _FILE.match(str(file))
            if found is not None:
                commits.add(found["commit"])
    return {"path": path, "name": task.config.dataset_name, "commit": ", ".join(sorted(commits)) or None}
