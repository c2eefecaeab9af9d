"""The trap: twelve faults that must be stopped, sound checkpoints that must not be, and the table of what stops what.

python -m tests.trap.run                      # prints the table; 1 where a fault passes or a sound one does not
python -m tests.trap.run --write              # also into docs/gate.md
python -m tests.trap.run --smollm2 FOLDER     # SmolLM2 in place of the embedded model, see tests/bench/smollm2.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from tests.trap.checkpoints import SOUND, SOUND_SMOLLM2, Sound, Workshop
from tests.trap.endpoints import Outcome, calibrated_scales, outcome
from tests.trap.faults import FAULTS, ROUNDED, TRANSPOSED, Fault
from tests.trap.layouts import BASE, layouts

PAGE = Path(__file__).parents[2] / "docs" / "gate.md"
MARKS = ("<!-- trap: written by `make trap` -->", "<!-- trap: end -->")
MARKS_SMOLLM2 = ("<!-- trap: written by `python -m tests.trap.run --smollm2 FOLDER --write` -->", MARKS[1])
"""The marks in the page between which a table is written."""
COLUMNS: Mapping[str, str] = {
    "inspection": "`inspect`",
    "servers": "validity",
    "canary": "canary",
    "kl": "KL",
    "layout": "layout",
}
"""What may stop a checkpoint, and its heading in the table."""


def try_sound(workshop: Workshop, base: Sound) -> Outcome:
    """Return what the endpoints say of a sound checkpoint."""
    checkpoint = workshop.checkpoint(base)
    return outcome(base, checkpoint, workshop.source(base.source), calibrated_scales(checkpoint))


def try_fault(workshop: Workshop, fault: Fault) -> Outcome:
    """Return what the endpoints say of a copy of the fault's sound checkpoint, with the fault."""
    made, source = workshop.checkpoint(fault.base), workshop.source(fault.base.source)
    with tempfile.TemporaryDirectory(dir=workshop.folder) as folder:
        copy = Path(folder) / "broken"
        shutil.copytree(made, copy)
        fault.inject(copy)
        mx_scales = "up" if fault.name == ROUNDED else None
        return outcome(fault.base, copy, source, calibrated_scales(made), mx_scales)


def try_layouts(workshop: Workshop, vllm: VllmEnvironment) -> tuple[Outcome, Outcome]:
    """Return what the layout's endpoint says of a sound launch on two processes, and of one with a transposed shard."""
    with layouts(workshop, vllm) as served:
        verdicts = [served.verdict(is_broken=is_broken) for is_broken in (False, True)]
    good, broken = (Outcome({"layout": verdict}, {"layout": (reason,)}) for verdict, reason in verdicts)
    return good, broken


def table(outcomes: Mapping[str, Outcome], good: Mapping[str, Outcome]) -> str:
    """Return the table of what stops what in Markdown; sound checkpoints are its last rows."""
    results = {**outcomes, **good}
    columns = [column for column in COLUMNS if any(column in result.verdicts for result in results.values())]
    lines = [f"| | {' | '.join(COLUMNS[column] for column in columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, result in results.items():
        cells = []
        for column in columns:
            verdict = result.verdicts.get(column)
            cells.append(
                "" if verdict is None else "passes" if column not in result.stoppers else _stop(result, column)
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _stop(result: Outcome, column: str) -> str:
    """Return the verdict of an endpoint in bold; of the inspection, the rule that names the fault."""
    if column != "inspection":
        return f"**{result.verdicts[column].value}**"
    rules = dict.fromkeys(reason.partition(":")[0] for reason in result.reasons[column])
    return f"**{next(iter(rules))}**"


def write(text: str, marks: tuple[str, str] = MARKS, page: Path = PAGE) -> None:
    """Write the table into the page, between its two marks. Raises `ValueError` where they are missing."""
    content = page.read_text(encoding="utf-8")
    before, begin, rest = content.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page}: found no {marks[0]} and {marks[1]} to write between")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trap; return 0 where it is whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.trap.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct, in place of the embedded model")
    parser.add_argument("--minutes", type=float, help="try nothing more after so many minutes")
    parser.add_argument("--write", action="store_true", help="write the table into docs/gate.md")
    options = parser.parse_args(arguments)
    embedded = options.smollm2 is None
    with tempfile.TemporaryDirectory(prefix="trap-") as folder:
        workshop = Workshop(Path(folder), options.smollm2)
        good: dict[str, Outcome] = {}
        outcomes: dict[str, Outcome] = {}
        tries = _tries(workshop, SOUND if embedded else SOUND_SMOLLM2, FAULTS if embedded else _on_smollm2())
        ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        for name, is_fault, attempt in tries:
            if ends is not None and time.monotonic() > ends:
                sys.stderr.write(f"not tried: {name}\n")
                continue
            (outcomes if is_fault else good)[name] = _said(name, attempt())
        if embedded and ends is None:
            outcomes[TRANSPOSED], good[f"{BASE.name}, TP 2"] = try_layouts(workshop, find_vllm())[::-1]
    text = table(outcomes, good)
    sys.stdout.write(f"{text}\n")
    passed = [name for name, result in outcomes.items() if not result.stoppers]
    stopped = [name for name, result in good.items() if result.stoppers]
    stopped_count = len(outcomes) - len(passed)
    sys.stdout.write(f"{stopped_count} of {len(outcomes)} faults stopped, {len(stopped)} of {len(good)} sound ones\n")
    for name in (*passed, *stopped):
        sys.stderr.write(f"wrong: {name}\n")
    if options.write:
        write(text, MARKS if embedded else MARKS_SMOLLM2)
    return 1 if passed or stopped else 0


def _tries(
    workshop: Workshop, sound: Iterable[Sound], faults: Mapping[str, Fault]
) -> Iterator[tuple[str, bool, Callable[[], Outcome]]]:
    """Yield (name, is a fault, function that tries it) of a sound checkpoint, its faults, and so on."""
    for base in sound:
        yield base.name, False, partial(try_sound, workshop, base)
        for name, fault in faults.items():
            if fault.base == base and name != TRANSPOSED:
                yield name, True, partial(try_fault, workshop, fault)


def _said(name: str, result: Outcome) -> Outcome:
    """Return the outcome, printed for those who wait."""
    verdicts = ", ".join(f"{column} {verdict.value}" for column, verdict in result.verdicts.items())
    reasons = "".join(f"\n    {reason}" for column in result.stoppers for reason in result.reasons[column][:2])
    sys.stderr.write(f"{name}: {verdicts}{reasons}\n")
    sys.stderr.flush()
    return result


def _on_smollm2() -> dict[str, Fault]:
    """Return the faults of dense models that files have, injected into SmolLM2 in place of the embedded model."""
    bases = {replace(base, source="embedded"): base for base in SOUND_SMOLLM2}
    return {name: replace(fault, base=bases[fault.base]) for name, fault in FAULTS.items() if fault.base in bases}


if __name__ == "__main__":
    sys.exit(main())
