"""What a user of llm-compressor or Quark would run: `python peers.py NAME TASK SOURCE DESTINATION`, TASK being JSON.

A task has the ``scheme``, the ``algorithm`` if there is one, the ``device``, the ``text`` to calibrate on, its
``batch``, and whether the ``kv_cache`` is in FP8. Prints the seconds from the process's start until its libraries were
imported, and of the work after that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IGNORE = ["lm_head", "re:.*embed_tokens$"]
_KV = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "observer": "static_minmax",
}
Work = Callable[[], object]


def _ids(task: dict[str, Any]) -> list[list[int]]:
    """The token ids of the calibration text, whose words are `w` and the id: [samples][length]."""
    return [[int(word[1:]) for word in line.split()] for line in Path(task["text"]).read_text().splitlines()]


def model_free_ptq(task: dict[str, Any], source: str, destination: str) -> Work:
    from llmcompressor import model_free_ptq as entry

    return lambda: entry(
        model_stub=source,
        save_directory=destination,
        scheme=task["scheme"],
        ignore=IGNORE,
        max_workers=min(4, len(os.sched_getaffinity(0))),
        device=task["device"],
    )


def oneshot(task: dict[str, Any], source: str, destination: str) -> Work:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot as entry
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM

    scheme: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"], "scheme": task["scheme"]}
    if task.get("kv_cache"):
        scheme["kv_cache_scheme"] = _KV
    tuned = "0" if torch.accelerator.is_available() else None
    recipe: dict[str | None, Callable[[], Any]] = {
        None: lambda: QuantizationModifier(**scheme),
        "gptq": lambda: GPTQModifier(**scheme),
        "awq": lambda: [AWQModifier(), QuantizationModifier(**scheme)],
        # torch.compile stood for five minutes on an H100.
        "autoround": lambda: AutoRoundModifier(**scheme, enable_torch_compile=False, device_ids=tuned),
    }
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_, **__: None  # AWQ would, which takes an accelerator

    def work() -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        ids = _ids(task)
        entry(
            model=model,
            dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}),
            recipe=recipe[task.get("algorithm")](),
            max_seq_length=len(ids[0]),
            num_calibration_samples=len(ids),
            batch_size=min(task["batch"], len(ids)),
            shuffle_calibration_samples=False,
        )
        model.save_pretrained(destination, save_compressed=True)

    return work


def quark(task: dict[str, Any], source: str, destination: str) -> Work:
    import torch
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
    from quark.torch.algorithm.api import blockwise_tuning_algo
    from quark.torch.algorithm.config import BlockwiseTuningConfig
    from quark.torch.utils.llm.model_preparation import preprocess_for_quantization
    from transformers import AutoModelForCausalLM

    def from_file() -> None:
        ModelQuantizer(config).direct_quantize_checkpoint(source, destination, device=task["device"])

    def in_memory() -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(task["device"])
        preprocess_for_quantization(model)
        batches = list(torch.tensor(_ids(task), device=task["device"]).split(task["batch"]))
        model = ModelQuantizer(config).quantize_model(model, batches)
        if blockwise:
            original: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(task["device"])
            tuning = BlockwiseTuningConfig(model_decoder_layers="model.layers", trainable_modules=["proj"])
            model = blockwise_tuning_algo(original, model, tuning, is_accelerate=False, dataloader=batches)
        model = ModelQuantizer.freeze(model)
        with torch.no_grad():
            export_safetensors(model, destination)

    template, algorithm = LLMTemplate.get("llama"), task.get("algorithm")
    blockwise = algorithm == "blockwise"  # which is no algorithm of the template's, and comes after them
    config: Any = template.get_config(
        task["scheme"],
        algorithm=None if blockwise else algorithm,
        kv_cache_scheme="fp8" if task.get("kv_cache") else None,
    )
    if not task["text"]:
        return from_file
    config.kv_cache_post_rope = bool(task.get("kv_cache"))
    return in_memory


def main(name: str, task: dict[str, Any], source: str, destination: str) -> None:
    work = {"model_free_ptq": model_free_ptq, "oneshot": oneshot, "quark": quark}[name](task, source, destination)
    imported = time.monotonic()
    work()
    ended = time.monotonic()
    seconds = {"start": imported - float(os.environ["BENCH_BEGUN"]), "work": ended - imported}
    sys.stdout.write("\n" + json.dumps({"seconds": seconds}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4])
