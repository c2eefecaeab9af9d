"""Which data set a task of lm-eval reads, and at which commit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from eval.errors import MeasurementError

# `datasets` keeps the address of every file that it fetched, with the commit that it resolved to.
_FILE = re.compile(r"^hf://datasets/(?P<path>[^@]+)@(?P<commit>[0-9a-f]{40})/")
# Builders of `datasets` that read files of ours; our files are in the stage's fingerprint.
_LOCAL = ("json", "csv", "parquet", "text", "arrow")


@contextmanager
def reading(commits: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, `datasets` reads these data sets of the Hub at these commits.

    lm-eval's tasks name no revision, a group may read several data sets, and some tasks fetch theirs by code of their
    own; `datasets.load_dataset` is what all of them come through.
    """
    import datasets

    load = datasets.load_dataset

    def load_at_commit(path: str, *args: Any, **options: Any) -> Any:
        if path in commits:
            options["revision"] = commits[path]
        return load(path, *args, **options)

    datasets.load_dataset = load_at_commit
    try:
        yield
    finally:
        datasets.load_dataset = load


def dataset_of(task: Any, wanted: Mapping[str, str] = MappingProxyType({})) -> dict[str, str | None] | None:
    """Path, name and commit of a loaded task's data set on the Hub; None for local files.

    lm-eval itself records no commit. What is told is what `datasets` remembers of the download; where it remembers
    nothing, the commit ``wanted`` of it by `reading`, or None. Several are joined by a comma. Raises `MeasurementError`
    where another was read than was wanted, as happens without a network if only that one is in its cache.
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
    read = ", ".join(sorted(commits)) or wanted.get(path)
    if path in wanted and read != wanted[path]:
        raise MeasurementError(f"{path} was to be read at commit {wanted[path]}, and {read} is what was read")
    return {"path": path, "name": task.config.dataset_name, "commit": read}
