"""One case from the model to a judgement of what a real vLLM answers, with its figures on record.

QUANTMINT_SERVED names a file that gets one JSON line a case: what was loaded or vLLM's own error, the kernels that its
log names, and how near its answers are to which reading of the checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmint.pipeline.base.errors import ServingError
from tests.serving.served.answers import serve
from tests.serving.served.cases import Case, make_case
from tests.serving.served.compare import Judgement, judge, remembered
from tests.serving.served.reference import Reference

if TYPE_CHECKING:
    from quantmint.pipeline.serving.environment import VllmEnvironment

VARIABLE = "QUANTMINT_SERVED"


def prove(
    case: Case,
    home: Path,
    vllm: VllmEnvironment,
    hardware: str,
    *,
    make: Callable[[Case, Path], Path] = make_case,
    carried: Callable[[Path], Path] = lambda folder: folder,
) -> Judgement:
    """Make the checkpoint, serve it, compare; raises `ServingError` or `AssertionError`, on record either way.

    ``make`` quantizes the embedded model into a folder, and returns it, as `make_case` does. ``carried`` takes the
    checkpoint elsewhere: what is served is what arrived, what it is compared to is what was made.
    """
    folder = make(case, home / "-".join(case.name.replace(",", "").split()))
    facts: dict[str, Any] = {
        **asdict(case),
        "engine": case.engine,
        "device": device_name(hardware),
        "vllm": vllm.version,
    }
    try:
        served = serve(case, carried(folder), vllm, hardware, cpu_threads=min(os.cpu_count() or 1, 4))
    except ServingError as error:
        _record({**facts, "loaded": False, "error": error.message})
        raise
    found = judge(case, served.answers, remembered(Reference(folder), served.answers))
    scan = served.scan
    _record(
        {
            **facts,
            "loaded": True,
            "started_seconds": round(served.started_seconds, 1),
            "kernels": scan.kernels,
            "attention": scan.attention_backend,
            "kv_cache_dtype": scan.kv_cache_dtype,
            "log": [finding._asdict() for finding in scan.findings],
            **found.to_json(),
        }
    )
    assert scan.invalid == ()
    assert found.objections == (), f"{case.name}: {'; '.join(found.objections)}"
    return found


def device_name(hardware: str) -> str:
    """The GPU as its driver calls it, or the CPU as the kernel does."""
    if hardware != "cpu":
        import torch

        return str(torch.cuda.get_device_name(0))
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _record(facts: dict[str, Any]) -> None:
    line = json.dumps(facts)
    print(line)  # noqa: T201 - pytest shows it with a failure, or with -s
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
