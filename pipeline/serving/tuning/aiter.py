"""AITER's search for matrix kernels: its tuner, for the products of a model whose layers it can run.

vLLM takes AITER's product for a layer only where AITER's table has the layer's shape (`can_implement` in
vllm/model_executor/kernels/linear/scaled_mm/aiter.py of 0.32), and TunableOp never sees such layers. So a tuner is
given all products of the model, for tokens in powers of two, which is how the last look-up pads them
(csrc/include/gemm_common.h); what it writes is a table that a variable names. Tuners are those of AITER 0.1.2x.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.processes import run_logged
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.tuning.space import Axis, TuningSubject
from quantmint.pipeline.serving.tuning.trials import Budget
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.tree import Store

FOLDER = "aiter"
_MOST_TOKENS = 8192  # the last look-up pads no further where a product is wide
_TABLES = {
    "ptpc_fp8": ("A8W8_BPRESHUFFLE", "a8w8_bpreshuffle"),
    "fp8_block": ("A8W8_BLOCKSCALE", "a8w8_blockscale"),
    "mxfp4": ("A4W4", "a4w4_blockscale"),
}
_TYPES = {"gfx942": "torch.float8_e4m3fnuz", "gfx950": "torch.float8_e4m3fn"}
_FUSED = re.compile(r"\.([qkv]|gate|up)_proj$")
_BY_COLUMNS = re.compile(r"\.(o|out|down)_proj$")
_SOURCES = "from aiter.jit.core import AITER_META_DIR; print(AITER_META_DIR)"


class Gemms(NamedTuple):
    """What a tuner is asked for a ``table`` that a ``variable`` names: lines of CSV with M, N, K, the weights' type."""

    variable: str
    table: str
    lines: tuple[str, ...]


def gemms(facts: ModelFacts, arch: str, plan: LaunchPlan) -> Gemms:
    """The products of a rank of ``plan``; UserError where AITER has no tuner for the model's scheme."""
    if facts.quantization not in _TABLES:
        expected = ", ".join(_TABLES)
        raise UserError(f"--aiter: AITER tunes no products of {facts.quantization}, expected one of {expected}")
    variable, table = _TABLES[facts.quantization]
    most = min(_MOST_TOKENS, int(plan.option("--max-num-batched-tokens") or _MOST_TOKENS))
    tokens = [1 << power for power in range(most.bit_length())]
    head, type_ = ("M,N,K,q_dtype_w", f",{_TYPES[arch]}") if table == "a8w8_bpreshuffle" else ("M,N,K", "")
    lines = (f"{m},{n},{k}{type_}" for n, k in shapes(facts, plan.layout.tensor) for m in tokens)
    return Gemms(f"AITER_CONFIG_GEMM_{variable}", table, (head, *lines))


def shapes(facts: ModelFacts, ranks: int) -> list[tuple[int, int]]:
    """Outputs and inputs of each dense product of a layer as vLLM fuses them and divides them over ``ranks``."""
    outputs: dict[tuple[int, str, int], int] = defaultdict(int)
    for weight in facts.module_weights:
        name = weight.name.removesuffix(".weight")
        if weight.linear and weight.layer is not None and weight.split in ("tensor", "kv", "shared"):
            columns = weight.parameters // weight.rows
            copies = min(ranks, facts.kv_heads) if weight.split == "kv" else ranks
            by_columns = _BY_COLUMNS.search(name) is not None
            module = _FUSED.sub("", name) if _FUSED.search(name) else name
            inputs = columns // ranks if by_columns else columns
            outputs[weight.layer, module, inputs] += weight.rows if by_columns else weight.rows // copies
    return sorted({(rows, inputs) for (_, _, inputs), rows in outputs.items()})


def tune_gemms(
    asked: Gemms, subject: TuningSubject, store: Store, budget: Budget, reporter: Reporter, out: Path, *, redo: bool
) -> Axis:
    """Have AITER tune into ``out``/aiter, once; what a sweep may then try.

    StageError, `OutOfTimeError`. A tuner that was stopped leaves nothing that counts.
    """
    machine = {"machine": dict(subject.machine), "vllm": subject.vllm.version}
    payload = {"stage": FOLDER, "version": 1, "inputs": {}, "gemms": asked._asdict(), **machine}
    name, print_ = f"{asked.table}_tuned_gemm", fingerprint(payload)
    if redo and (entry := store.find(FOLDER, print_)) is not None:
        store.retire(entry)
    with store.working(FOLDER, print_, on_wait=reporter.say) as work:
        if work.existing is None:
            work.discard()
            started = datetime.now(UTC)
            reporter.say(f"AITER tunes {len(asked.lines) - 1} products")
            _run(asked, subject, store, budget, work.path, work.path / f"{name}.csv")
            work.commit(payload=payload, result={}, started=started, tools={"vllm": subject.vllm.version})
    made = store.entry_path(FOLDER, print_) / f"{name}.csv"
    # A trial's fingerprint has the path alone: the name says what is in the file.
    kept = (out / FOLDER / f"{name}.{sha256_of(made)[:12]}.csv").absolute()
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, kept)
    return Axis(asked.variable, (str(kept),))


def _run(asked: Gemms, subject: TuningSubject, store: Store, budget: Budget, folder: Path, tuned: Path) -> None:
    shapes = folder / "untuned.csv"
    shapes.write_text("\n".join(asked.lines) + "\n", encoding="utf-8")
    python = str(subject.vllm.python)
    try:
        # Importing it may build something.
        found = subprocess.run([python, "-c", _SOURCES], check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        raise StageError(f"cannot find AITER's tuners: {error}", hint="they come with its wheel") from error
    tuner = Path(found.stdout.split()[-1]) / "csrc" / f"ck_gemm_{asked.table}" / f"gemm_{asked.table}_tune.py"
    log = store.root / "logs" / f"aiter-{subject.name}.log"
    argv = [python, str(tuner), "-i", str(shapes), "-o", str(tuned)]
    run_logged(argv, log, what="AITER's tuner", env={}, watch=budget.check)
    if not tuned.is_file() or len(tuned.read_text(encoding="utf-8").splitlines()) < 2:
        raise StageError("AITER's tuner found no kernel", hint=f"Its whole log: {log}")
