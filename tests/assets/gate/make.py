"""Makes the records beside it: `python -m tests.assets.gate.make PASS FAIL STOPPED`, three entries of a store.

The entries are those of the stage `gate` after real runs of the embedded model with lm-eval and the reference runtime,
suite tiny, 2000 and 400 items in four looks, with a control, of

- PASS: ptpc_fp8 with an FP8 KV cache (`recipes/tiny-ptpc-fp8kv.yaml` with `runtime: reference`, `min_ratio: null`);
- FAIL: mxfp4 by rounding;
- STOPPED: the first again, with one layer's scales times 4 (`four_times_too_large`), which the canary ended.
"""

from __future__ import annotations

import shutil
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from quantmint.eval import record
from quantmint.eval.gate import judge

FOLDER = Path(__file__).parent


def keep(case: str, entry: Path) -> None:
    measurements, recorded = record.read(entry / "gate.json")
    report = judge(measurements, recorded.policy)
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
    for case, entry in zip(("pass", "fail", "stopped"), sys.argv[1:], strict=True):
        keep(case, Path(entry))
