"""The trap: twelve faults that must be stopped, sound checkpoints that must not be, and the table of what stops what.

python -m tests.trap.run                      # prints the table; 1 where a fault passes or a sound one does not
python -m tests.trap.run --write              # also into docs/gate.md
python -m tests.trap.run --smollm2 FOLDER     # SmolLM2 beside the embedded model, see tests/bench/smollm2.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from tests.trap.checkpoints import SMOLLM2, Sound, Workshop, sound
from tests.trap.endpoints import Outcome, calibrated_scales, outcome
from tests.trap.faults import FAULTS, ROUNDED, TRANSPOSED, Fault
from tests.trap.layouts import BASE, layouts

PAGE = Path(__file__).parents[2] / "docs" / "gate.md"
_BEGIN, _END = "<!-- trap: written by `make trap` -->", "<!-- trap: end -->"
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
    lines = [f"| | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, result in {**outcomes, **good}.items():
        cells = []
        for column in COLUMNS:
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


def write(text: str, page: Path = PAGE) -> None:
    """Write the table into the page, between its two marks. Raises `ValueError` where they are missing."""
    content = page.read_text(encoding="utf-8")
    before, begin, rest = content.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page}: found no {_BEGIN} and {_END} to write between")
    page.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trap; return 0 where it is whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.trap.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct, to try too")
    parser.add_argument("--write", action="store_true", help="write the table into docs/gate.md")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="trap-") as folder:
        workshop = Workshop(Path(folder), options.smollm2)
        good = {base.name: try_sound(workshop, base) for base in sound(options.smollm2)}
        faults = dict(FAULTS) if options.smollm2 is None else {**FAULTS, **_on_smollm2()}
        outcomes = {name: try_fault(workshop, fault) for name, fault in faults.items() if name != TRANSPOSED}
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
        write(text)
    return 1 if passed or stopped else 0


def _on_smollm2() -> dict[str, Fault]:
    """Return the faults of dense models, injected into SmolLM2 in place of the embedded model."""
    bases = {base: replace(base, source=SMOLLM2) for base in sound() if base.source == "embedded"}
    return {
        f"{name}, {SMOLLM2}": replace(fault, base=bases[fault.base])
        for name, fault in FAULTS.items()
        if fault.base in bases and name not in (TRANSPOSED, ROUNDED)
    }


if __name__ == "__main__":
    sys.exit(main())
