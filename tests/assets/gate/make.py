"""Makes the records beside it: `python -m tests.assets.gate.make PASS FAIL INVALID STOPPED`, four entries of a store.

The entries are those of the stage `gate` after real runs of the embedded model with lm-eval and the reference runtime,
suite tiny, 2000 and 400 items in four looks, with a control, of

- PASS: ptpc_fp8 with an FP8 KV cache (`recipes/tiny-ptpc-fp8kv.yaml` with `runtime: reference`, `min_ratio: null`);
- FAIL: mxfp4 by rounding;
- INVALID: the first again, of a model with another chat template (`tests.e2e.remade.another_template`);
- STOPPED: the first again, with one layer's scales times 4 (`four_times_too_large`), which the canary ended.

`inconclusive` is the first, cut after the first look. To keep the files small, it and `invalid` have one task of two.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from eval import record
from eval.gate import Policy, judge
from eval.measurements import Measurements

FOLDER = Path(__file__).parent
TASK = "tiny_arithmetic"


def only_one_task(measurements: Measurements) -> Measurements:
    kept = {TASK: measurements.samples[TASK]}
    return replace(measurements, samples=kept, control={TASK: measurements.control[TASK]})


def cut_after_the_first_look(measurements: Measurements) -> Measurements:
    one = only_one_task(measurements)
    baseline, candidate = one.samples[TASK]
    first = tuple(sample for sample in candidate.samples if sample.look == 0)
    return replace(one, samples={TASK: (baseline, replace(candidate, samples=first))})


def keep(case: str, entry: Path, change: Callable[[Measurements], Measurements] | None = None) -> None:
    measurements, recorded = record.read(entry / "gate.json")
    policy = recorded.policy
    if change is not None:
        measurements = change(measurements)
        policy = Policy.from_json({**policy.to_json(), "margins": {TASK: policy.margins[TASK]}, "baseline_score": {}})
    report = judge(measurements, policy)
    with TemporaryDirectory() as folder:
        written = record.write(Path(folder), measurements, report)
        text = written.read_text(encoding="utf-8")
        # What several records are made of is there once, by its content.
        for path in (written.parent / "samples").iterdir():
            name = f"samples/{sha256(path.read_bytes()).hexdigest()[:12]}.json.gz"
            shutil.copyfile(path, FOLDER / name)
            text = text.replace(f'"samples/{path.name}"', f'"{name}"')
    (FOLDER / f"{case}.json").write_text(text, encoding="utf-8")
    print(case, report.verdict.value, *report.reasons, sep="\n  ")  # noqa: T201 - run by hand


if __name__ == "__main__":
    passed, failed, invalid, stopped = map(Path, sys.argv[1:])
    keep("pass", passed)
    keep("fail", failed)
    keep("inconclusive", passed, cut_after_the_first_look)
    keep("invalid", invalid, only_one_task)
    keep("stopped", stopped)
