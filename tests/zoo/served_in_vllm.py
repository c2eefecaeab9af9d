"""Ask vLLM, in process, for the log probabilities of a fixed prompt by each of several checkpoints.

    .venv-vllm/bin/python tests/zoo/served_in_vllm.py --limit 60 FOLDER... > answers.jsonl

The script runs in vLLM's environment and imports nothing of quantmint. vLLM is imported once; each folder is loaded in
a fork of that process, so that no engine meets the state of another one. A line of the output is a JSON object: folder;
logprobs, a list of nats or null; error, null or the first line; seconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

for _variable, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the gathering of log probabilities takes longer than all else
}.items():
    os.environ.setdefault(_variable, _value)

PROMPT_TOKENS = 24
_MODULES = (
    "transformers.file_utils",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.layers.mamba.mamba_mixer2",
    "vllm.model_executor.layers.mla",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.quark.quark",
    "vllm.model_executor.models.transformers",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
# vLLM's classes of models with towers import them; its CPU environment is installed without.
_ABSENT = ("torchvision", "torchvision.io", "torchvision.ops", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.functional", "torchvision.transforms.v2.functional")
_MODEL_LENGTH = 64


def prompt() -> list[int]:
    """Return the token ids of the prompt: drawn once for all models, text in each vocabulary of the zoo."""
    return random.Random(20).choices(range(8, 1000), k=PROMPT_TOKENS)


def logprobs(folder: Path) -> list[float]:
    """Load a checkpoint and return log P(token | those before it) of each prompt token but the first, nats."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=_MODEL_LENGTH,
        max_num_seqs=1,
        max_num_batched_tokens=_MODEL_LENGTH,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        **({"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}} if _has_towers(folder) else {}),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    ids = prompt()
    (answer,) = engine.generate([TokensPrompt(prompt_token_ids=ids)], sampling, use_tqdm=False)
    return [position[token].logprob for token, position in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]


def _has_towers(folder: Path) -> bool:
    """Return whether config.json describes more than a language model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return any(key.endswith("_config") and key != "quantization_config" and isinstance(config[key], dict) for key in config)


def answer(folder: Path) -> dict[str, Any]:
    """Return the line for a checkpoint."""
    started = time.monotonic()
    line: dict[str, Any] = {"folder": str(folder), "logprobs": None, "error": None}
    try:
        line["logprobs"] = logprobs(folder)
    except Exception as error:
        if os.environ.get("VERBOSE"):
            traceback.print_exception(error)
        line["error"] = _reason(error, folder)
    return {**line, "seconds": round(time.monotonic() - started, 2)}


def _reason(error: Exception, folder: Path) -> str:
    """Return an error in one line; why a class cannot be imported, where vLLM only says so in its log."""
    if "failed to be inspected" in str(error):
        from vllm.model_executor.models import ModelRegistry

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        try:
            ModelRegistry.models[config["architectures"][0]].load_model_cls()
        except Exception as cause:
            error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    several = 3 if type(error).__name__ == "ValidationError" else 1
    return f"{type(error).__name__}: {' '.join(lines[:several])}"[:400]


def answer_in_fork(folder: Path, limit: float) -> dict[str, Any]:
    """Return the line for a checkpoint from a fork of this process, which is killed after ``limit`` seconds."""
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reading)
        os.setsid()
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            json.dump(answer(folder), pipe)
        os._exit(0)
    os.close(writing)
    status = None
    while status is None and time.monotonic() - started < limit:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.05)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    if text:
        return json.loads(text)
    error = f"no answer within {limit:g} s" if status is None else f"the process ended with status {status}"
    return {"folder": str(folder), "logprobs": None, "error": error, "seconds": round(time.monotonic() - started, 2)}


def prepare() -> None:
    """Import what every engine needs, without a thread that a fork would lack."""
    import torch

    torch.set_num_threads(1)
    from vllm.model_executor.models import registry

    for module in _MODULES:
        importlib.import_module(module)
    _stub_processors()
    registry._run_in_subprocess = lambda function: function()  # saves an import of vLLM for each class
    gc.collect()
    gc.freeze()  # vLLM collects eight times while it loads a model


def _stub_processors() -> None:
    """Load models with towers without the processors of images and sound, which a prompt of text never reaches."""
    import transformers

    def from_pretrained(*_: Any, **__: Any) -> Any:
        processor = MagicMock()
        processor.__class__ = transformers.ProcessorMixin
        return processor

    for name in ("AutoImageProcessor", "AutoFeatureExtractor", "AutoProcessor", "AutoVideoProcessor"):
        getattr(transformers, name).from_pretrained = from_pretrained
    sys.modules.update({name: MagicMock(__spec__=None, __path__=[]) for name in _ABSENT if name not in sys.modules})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="checkpoint to load")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="time for one checkpoint")
    options = parser.parse_args(arguments)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints
    prepare()
    for folder in options.folders:
        output.write(json.dumps(answer_in_fork(folder, options.limit)) + "\n")
        output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
