"""Run `quantmint` and sample what its threads do.

::

    python -m tests.bench.sampled OUT.json [--workers N] -- quantize MODEL OUT --scheme mxfp4

A thread looks at the others every few milliseconds and counts the line that each stands on. Lines that wait for a GPU
are few; time that is spread over all lines of a kernel is spent on the interpreter's lock. ``--workers`` is the number
of threads of each GPU, in place of the engine's own.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

_INTERVAL_S = 0.005
_OURS = str(Path(__file__).parents[2])


class Sampler:
    """Counts samples by thread pool and by the innermost line of this repository."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            frames = sys._current_frames()
            for thread in threading.enumerate():
                if thread is not self._thread and thread.ident in frames:
                    self.counts[thread.name.partition("_")[0], _place(frames[thread.ident])] += 1


def _place(frame: FrameType) -> str:
    """The innermost line of this repository, with the function that it calls beyond."""
    inner, beyond = frame, None
    while inner.f_back is not None and not inner.f_code.co_filename.startswith(_OURS):
        inner, beyond = inner.f_back, inner
    path = Path(inner.f_code.co_filename).name
    called = "" if beyond is None else f" -> {beyond.f_code.co_name}"
    return f"{path}:{inner.f_lineno} {inner.f_code.co_name}{called}"


def main(arguments: list[str]) -> None:
    """Run the command line behind ``--``; write the samples to the first argument as JSON, the most frequent first."""
    ours, theirs = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    out = Path(ours[0])
    if "--workers" in ours:
        from quantmint.pipeline.quantize.engines.stream import schedule

        schedule._GPU_WORKERS = int(ours[ours.index("--workers") + 1])
    from quantmint.pipeline.commands.cli import main as command

    sys.argv = ["quantmint", *theirs]
    sampler = Sampler()
    try:
        with sampler:
            command()
    finally:
        rows = [[pool, place, count] for (pool, place), count in sampler.counts.most_common()]
        out.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main(sys.argv[1:])
