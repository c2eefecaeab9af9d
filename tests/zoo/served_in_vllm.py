"""Ask vLLM, in process, for the log probabilities of a fixed prompt by each of several checkpoints.

    .venv-vllm/bin/python tests/zoo/served_in_vllm.py --limit 60 FOLDER... > answers.jsonl

The script runs in vLLM's environment and imports nothing of quantmint. vLLM is imported once; each folder is loaded in
a fork of that process, so that no engine meets the state of another one. A line of the output is a JSON object: folder;
logprobs, nats, and plain, the same with the activations of FP8 layers left in 16 bit, which shows the weights without
the noise of roundings; error, null or the first line; tower, the error of a first try with the model's towers, which
the answers are without, or null; seconds.
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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
_ABSENT = (
    "torchvision",
    *(f"torchvision.{part}" for part in ("io", "ops", "transforms", "transforms.functional", "transforms.v2")),
    "torchvision.transforms.v2.functional",
)
_MODEL_LENGTH = 64
_EMPTY: dict[str, Any] = {"folder": "", "logprobs": None, "plain": None, "error": None, "tower": None, "seconds": 0.0}
_state = {"rounds": True}


def prompt() -> list[int]:
    """Return the token ids of the prompt: drawn once for all models, text in each vocabulary of the zoo."""
    return random.Random(20).choices(range(8, 1000), k=PROMPT_TOKENS)  # noqa: S311 - no secret


def logprobs(folder: Path) -> tuple[list[float], list[float]]:
    """Load a checkpoint and return log P(token | those before it) of each prompt token but the first, nats.

    The second list is that with activations in 16 bit.
    """
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
    ids, answers = prompt(), []
    for _state["rounds"] in (True, False):
        (answer,) = engine.generate([TokensPrompt(prompt_token_ids=ids)], sampling, use_tqdm=False)
        positions = zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
        answers.append([position[token].logprob for token, position in positions])
    return answers[0], answers[1]


def _has_towers(folder: Path) -> bool:
    """Return whether config.json describes more than a language model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return any(
        key.endswith("_config") and key != "quantization_config" and isinstance(config[key], dict) for key in config
    )


def answer(folder: Path, *, towers: bool) -> dict[str, Any]:
    """Return the line for a checkpoint; without ``towers`` vLLM skips their weights, as no prompt has an image."""
    if towers:
        from vllm.model_executor.models import utils

        utils.no_init_weights = lambda *_, **__: nullcontext()
    started = time.monotonic()
    line: dict[str, Any] = {**_EMPTY, "folder": str(folder)}
    try:
        line["logprobs"], line["plain"] = logprobs(folder)
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
    if not lines:
        place = traceback.extract_tb(error.__traceback__)[-1]
        lines = [f"{Path(place.filename).name}: {place.line}"]
    several = 3 if type(error).__name__ == "ValidationError" else 1
    return f"{type(error).__name__}: {' '.join(lines[:several])}"[:400]


def answer_in_forks(folder: Path, limit: float) -> dict[str, Any]:
    """Return the line for a checkpoint, loaded without its towers where it cannot be loaded with them."""
    line = answer_in_fork(folder, limit, towers=True)
    if line["error"] is None or not _has_towers(folder):
        return line
    return {**answer_in_fork(folder, limit, towers=False), "tower": line["error"]}


def answer_in_fork(folder: Path, limit: float, *, towers: bool) -> dict[str, Any]:
    """Return the line for a checkpoint from a fork of this process, which is killed after ``limit`` seconds."""
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reading)
        os.setsid()
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            json.dump(answer(folder, towers=towers), pipe)
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
    return {**_EMPTY, "folder": str(folder), "error": error, "seconds": round(time.monotonic() - started, 2)}


def prepare() -> None:
    """Import what every engine needs, without a thread that a fork would lack."""
    import torch

    torch.set_num_threads(1)
    from vllm.model_executor.models import registry
    from vllm.triton_utils import dispatcher

    for module in _MODULES:
        importlib.import_module(module)
    _stub_processors()
    _multiply_experts_in_16_bit()
    _multiply_in_16_bit()
    _route_by_sigmoid()
    _rotate_natively()
    # It looks for kernels in the attributes of all objects, and some objects have a ``__dict__`` that is none.
    dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, Mapping) else {}
    registry._run_in_subprocess = lambda function: function()  # saves an import of vLLM for each class
    gc.collect()
    gc.freeze()  # vLLM collects eight times while it loads a model


def _multiply_experts_in_16_bit() -> None:
    """Dequantize experts with FP8 channels once vLLM's loaders have placed them: no CPU kernel multiplies such."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as of_compressed_tensors,
    )
    from vllm.model_executor.layers.quantization.quark import quark_moe as of_quark
    from vllm.model_executor.utils import replace_parameter

    def patched(process: Any) -> Any:
        def process_weights_after_loading(method: Any, layer: Any) -> None:
            if method.fp8_backend != Fp8MoeBackend.NONE:
                process(method, layer)
                return
            for name in ("w13", "w2"):
                weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
                numbers = weight.float() * scale.reshape(*weight.shape[:2], 1)
                replace_parameter(layer, f"{name}_weight", numbers.to(layer.orig_dtype))
            plain = UnquantizedFusedMoEMethod(method.moe)
            plain.process_weights_after_loading(layer)
            method.moe_kernel, method.moe_quant_config = plain.moe_kernel, plain.moe_quant_config

        return process_weights_after_loading

    for method in (of_compressed_tensors.CompressedTensorsW8A8Fp8MoEMethod, of_quark.QuarkW8A8Fp8MoEMethod):
        method.process_weights_after_loading = patched(method.process_weights_after_loading)


def _multiply_in_16_bit() -> None:
    """Let FP8 layers multiply with activations in 16 bit while ``_state["rounds"]`` is False."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

    rounding = Kernel.apply_weights

    def apply_weights(kernel: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        if _state["rounds"]:
            return rounding(kernel, layer, x, bias)
        weight, scale, *_ = kernel._get_layer_params(layer)  # [I, O] and [O, 1]
        return torch.nn.functional.linear(x, (weight.float() * scale.t()).t().to(x.dtype), bias)

    Kernel.apply_weights = apply_weights


def _route_by_sigmoid() -> None:
    """Route by sigmoids without groups as with one group of all experts: vLLM's CPU build has the latter alone."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute = CPURouter._compute_routing

    def compute_routing(router: Any, *arguments: Any, **options: Any) -> Any:
        if router.scoring_func == "sigmoid" and router.custom_routing_function is None and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
        return compute(router, *arguments, **options)

    CPURouter._compute_routing = compute_routing


def _rotate_natively() -> None:
    """Rotate queries and keys by PyTorch: the kernel of vLLM's CPU build errs for the slices of latent attention."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


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
        output.write(json.dumps(answer_in_forks(folder, options.limit)) + "\n")
        output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
