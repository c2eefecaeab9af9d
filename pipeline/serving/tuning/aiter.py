"""Run AITER's tuner for the matrix products of a model's dense layers.

vLLM uses AITER's kernel for a layer only if AITER's table has the layer's shape (`can_implement` in
vllm/model_executor/kernels/linear/scaled_mm/aiter.py of 0.32), and TunableOp does not see these layers. So the tuner
gets all dense products of the model, for numbers of tokens that are powers of two, to which AITER pads the last look-up
(csrc/include/gemm_common.h). It writes a table, and an environment variable names its path. Tuners of AITER 0.1.2x.
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
from quantmint.pipeline.serving.tuning.space import Axis
from quantmint.pipeline.serving.tuning.subject import TuningSubject
from quantmint.pipeline.serving.tuning.trials import Budget
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.tree import Store

FOLDER = "aiter"
_MOST_TOKENS = 8192  # AITER pads wide products to at most this many tokens
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
    """The input of AITER's tuner ``table``: CSV lines with M, N, K and the type of the weights.

    ``variable`` is the environment variable that names the tuned table.
    """

    variable: str
    table: str
    lines: tuple[str, ...]


def gemms(facts: ModelFacts, arch: str, plan: LaunchPlan) -> Gemms:
    """Return the products of one rank of ``plan``.

    Raises `UserError` when AITER has no tuner for the model's scheme.
    """
    if facts.quantization not in _TABLES:
        expected = ", ".join(_TABLES)
        raise UserError(f"--aiter: AITER tunes no products of {facts.quantization}, expected one of {expected}")
    variable, table = _TABLES[facts.quantization]
    largest = min(_MOST_TOKENS, int(plan.option("--max-num-batched-tokens") or _MOST_TOKENS))
    tokens = [1 << power for power in range(largest.bit_length())]
    header, type_ = ("M,N,K,q_dtype_w", f",{_TYPES[arch]}") if table == "a8w8_bpreshuffle" else ("M,N,K", "")
    lines = (f"{m},{n},{k}{type_}" for n, k in shapes(facts, plan.layout.tensor) for m in tokens)
    return Gemms(f"AITER_CONFIG_GEMM_{variable}", table, (header, *lines))


def shapes(facts: ModelFacts, ranks: int) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each distinct dense product, as vLLM fuses and divides them over ``ranks``."""
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
    products: Gemms, subject: TuningSubject, store: Store, budget: Budget, reporter: Reporter, out: Path, *, redo: bool
) -> Axis:
    """Tune the products, or take the result from the store, and return the axis for a sweep to try.

    The tuned table is copied to ``out``/aiter. Raises `StageError` when the tuner is missing or finds nothing,
    `OutOfTimeError` when the budget ends; nothing is stored then.
    """
    machine = {"machine": dict(subject.machine), "vllm": subject.vllm.version}
    payload = {"stage": FOLDER, "version": 1, "inputs": {}, "gemms": products._asdict(), **machine}
    name, print_ = f"{products.table}_tuned_gemm", fingerprint(payload)
    if redo and (entry := store.find(FOLDER, print_)) is not None:
        store.retire(entry)
    with store.working(FOLDER, print_, on_wait=reporter.say) as work:
        if work.existing is None:
            work.discard()
            started = datetime.now(UTC)
            reporter.say(f"AITER tunes {len(products.lines) - 1} products")
            _run(products, subject, store, budget, work.path, work.path / f"{name}.csv")
            work.commit(payload=payload, result={}, started=started, tools={"vllm": subject.vllm.version})
    stored = store.entry_path(FOLDER, print_) / f"{name}.csv"
    # A trial's fingerprint includes only the path, so the file's name identifies its contents.
    copy = (out / FOLDER / f"{name}.{sha256_of(stored)[:12]}.csv").absolute()
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(stored, copy)
    return Axis(products.variable, (str(copy),))


def _run(products: Gemms, subject: TuningSubject, store: Store, budget: Budget, folder: Path, tuned: Path) -> None:
    shapes = folder / "untuned.csv"
    shapes.write_text("\n".join(products.lines) + "\n", encoding="utf-8")
    python = str(subject.vllm.python)
    try:
        # The timeout is long, because importing AITER may compile something.
        sources = subprocess.run([python, "-c", _SOURCES], check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        raise StageError(f"cannot find AITER's tuners: {error}", hint="AITER's wheel contains them") from error
    tuner = Path(sources.stdout.split()[-1]) / "csrc" / f"ck_gemm_{products.table}" / f"gemm_{products.table}_tune.py"
    log = store.root / "logs" / f"aiter-{subject.name}.log"
    argv = [python, str(tuner), "-i", str(shapes), "-o", str(tuned)]
    run_logged(argv, log, what="AITER's tuner", env={}, watch=budget.check)
    if not tuned.is_file() or len(tuned.read_text(encoding="utf-8").splitlines()) < 2:
        raise StageError("AITER's tuner found no kernel", hint=f"Its whole log: {log}")
