"""What is compared: command lines, each of which is started as a user would start it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CASES: Mapping[str, str] = {
    "ptpc_fp8": "FP8, weights per channel, no calibration",
    "fp8_block": "FP8, weights per block of 128 x 128, no calibration",
    "mxfp4": "MXFP4, no calibration",
    "fp8_kv": "FP8 with static scales of inputs and KV cache, calibrated",
    "mxfp4_gptq": "MXFP4 by GPTQ, calibrated",
    "mxfp4_tuned": "MXFP4 by GPTQ with tuned norms, beside AutoRound, calibrated",
}
LLM_COMPRESSOR = {
    "ptpc_fp8": "FP8_DYNAMIC",
    "fp8_block": "FP8_BLOCK",
    "mxfp4": "MXFP4",
    "fp8_kv": "FP8",
    "mxfp4_gptq": "MXFP4",
    "mxfp4_tuned": "MXFP4",
}
QUARK = {"ptpc_fp8": "ptpc_fp8", "mxfp4": "mxfp4", "fp8_kv": "fp8", "mxfp4_gptq": "mxfp4"}
CALIBRATED = ("fp8_kv", "mxfp4_gptq", "mxfp4_tuned")
ALGORITHMS = {"mxfp4_gptq": ("gptq", "gptq"), "mxfp4_tuned": ("tuned", "autoround")}
"""Our algorithm in a case, and the other libraries'."""
FIRST = "quantmint-first"
OURS: Mapping[str, str] = {
    "quantmint": "quantmint quantize",
    FIRST: "the same, of a model not seen before",
    "quantmint-unproven": "the same with --no-inspect",
    "quantmint-plain": "the same with neither compensation nor scaling",
}
PEERS: Mapping[str, str] = {"llm-compressor": "llmcompressor", "quark": "quark.torch"}
"""The other libraries, and what each imports."""
BASELINES: Mapping[str, str] = {
    "import-torch": "import torch, and a tensor on the device",
    "import-transformers": "import transformers and a model's class",
    "cp": "cp -r",
}
"""What no case changes."""
_PEERS = Path(__file__).with_name("peers.py")
_LIMITED = Path(__file__).with_name("limited.py")
_BATCH = 8


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to make: ``case`` of `CASES` on ``device``, calibrated on the lines of a file of ``words``, each of
    which is a sample of ``length`` tokens. ``gpu_memory`` are the GB of a GPU that ours may take."""

    case: str
    device: str
    words: Path
    samples: int
    length: int
    gpu_memory: float | None = None

    @property
    def calibrated(self) -> bool:
        return self.case in CALIBRATED


def title(contender: str, case: str) -> str:
    """A contender in the words of tables, with the entry and the scheme where it is a library."""
    if contender == "llm-compressor":
        return f"llm-compressor: {'oneshot' if case in CALIBRATED else 'model_free_ptq'} {LLM_COMPRESSOR[case]}"
    if contender == "quark":
        return f"quark: {'in memory' if case in CALIBRATED else 'file to file'} {QUARK[case]}"
    return {**OURS, **BASELINES}[contender]


def takes_part(contender: str, case: str) -> bool:
    """Whether a contender has a way to make a case."""
    return (contender != "quark" or case in QUARK) and (contender != "quantmint-plain" or case == "mxfp4_gptq")


def absent(contender: str) -> bool:
    """Whether what a contender needs is not installed."""
    return contender in PEERS and find_spec(PEERS[contender].partition(".")[0]) is None


def command(contender: str, task: Task, source: Path, destination: Path) -> list[str]:
    """The command line that makes ``destination`` of ``source``; for some baselines one that makes nothing."""
    python, folders = sys.executable, [str(source), str(destination)]
    match contender:
        case "cp":
            return ["cp", "-r", *folders]
        case "import-torch":
            return [python, "-c", f"import torch; torch.zeros(1, device={task.device!r})"]
        case "import-transformers":
            return [python, "-c", "import transformers; from transformers import LlamaForCausalLM"]
        case "llm-compressor":
            name, scheme = "oneshot" if task.calibrated else "model_free_ptq", LLM_COMPRESSOR[task.case]
        case "quark":
            name, scheme = "quark", QUARK[task.case]
        case _:
            ours = ["-m", "quantmint"] if task.gpu_memory is None else [str(_LIMITED), str(task.gpu_memory)]
            return [python, *ours, "quantize", *folders, *_options(contender, task)]
    text = str(task.words) if task.calibrated else None
    _, algorithm = ALGORITHMS.get(task.case, (None, None))
    order = {"scheme": scheme, "algorithm": algorithm, "device": task.device, "text": text, "batch": _BATCH}
    order["kv_cache"] = task.case == "fp8_kv"
    return [python, str(_PEERS), name, json.dumps(order), *folders]


def _options(contender: str, task: Task) -> list[str]:
    scheme = "fp8" if task.case == "fp8_kv" else "mxfp4" if task.case in ALGORITHMS else task.case
    options = ["--scheme", scheme, "--device", task.device, "--json"]
    if contender == "quantmint-unproven":
        options.append("--no-inspect")
    if task.calibrated:
        ours, _ = ALGORITHMS.get(task.case, (None, None))
        options += ["--kv-cache", "fp8"] if ours is None else ["--algorithm", ours]
        options += ["--calibration", str(task.words.with_suffix(".yaml")), "--no-packing"]
        options += ["--samples", str(task.samples), "--sequence-length", str(task.length)]
        options += ["--batch-size", str(_BATCH)]
    if contender == "quantmint-plain":
        options += ["--parameter", "compensation=0", "--parameter", "scaling=false"]
    return options
