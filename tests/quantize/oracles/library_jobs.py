"""Run several jobs of one library in one process, because importing it takes longer than a tiny model.

    python -m tests.quantize.oracles.library_jobs quantmint.pipeline.quantize.engines.libraries.with_quark JOB.json...

Says ``failed NAME: reason`` for a job that ends with an exception, and goes on.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

import torch

from quantmint.pipeline.quantize.engines.libraries.job import LibraryJob

if __name__ == "__main__":
    worker = importlib.import_module(sys.argv[1])
    # What Quark compiles takes longer to compile than to run. By with_quark it is compiled, and has the same bytes.
    torch.compiler.set_stance("force_eager")
    for path in map(Path, sys.argv[2:]):
        try:
            worker.main(LibraryJob.load(path))
        except Exception as error:
            traceback.print_exc()
            (path.parent / f"{path.stem}.failed").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
