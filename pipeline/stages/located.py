"""source, for a checkpoint without a recipe: a folder that is here already, known by its files' marks.

Nothing is proven of the result but its structure, so the weights need not be read for a digest before they are read
to be quantized. A mark is what a file system changes with the bytes: size, both times, inode. Small files are hashed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.digest import model_files
from pipeline.formats.checkpoint import open_checkpoint
from pipeline.stage import Job, Output, Setting, Stage, write_json
from pipeline.stages.source import LOCATION, model_folder
from pipeline.store.disk import sha256_of
from pipeline.store.entries import Entry


@dataclass(frozen=True, slots=True)
class LocatedSource(Stage):
    """``folder`` holds the whole model; a repository's is the Hub's cache at a commit."""

    folder: Path
    key: str = "source"
    family: str = "source"
    version: int = 1

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The commit of a repository; else the mark of each file."""
        return setting.source.to_json() if setting.source.repo is not None else {"files": marks(self.folder)}

    def run(self, job: Job) -> Output:
        """Prove that configuration, index and shards agree."""
        checkpoint = open_checkpoint(self.folder)
        write_json(job.path / LOCATION, {"folder": str(self.folder.resolve()), "files": {}})
        return Output(
            result={"bytes": checkpoint.nbytes, "shards": len(checkpoint.shards)},
            summary=f"{checkpoint.nbytes / 1e6:,.1f} MB in {len(checkpoint.shards)} file(s)",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Whether the model still lies where it was noted; that it is the same one, its fingerprint says."""
        return model_folder(entry) == self.folder.resolve()


def marks(folder: Path) -> dict[str, str]:
    """What tells a changed file of a model from the one it was, by name."""
    found: dict[str, str] = {}
    for path in model_files(folder):
        status, name = path.stat(), path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            times = f"{status.st_mtime_ns}, {status.st_ctime_ns}"
            found[name] = f"{status.st_size} bytes, {times}, inode {status.st_ino}"
        else:
            found[name] = sha256_of(path)
    return found
