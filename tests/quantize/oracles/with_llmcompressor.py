"""Quantize folders with llm-compressor: the oracle for bytes and configurations.

Reads a JSON list of jobs from the first argument; each has source, out, scheme (None: the KV cache only), kv_cache,
ids (rows of token ids) and batch_size. A process of its own, because llm-compressor patches what it imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

KV = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "observer": "static_minmax",
}


def run(source: str, out: str, scheme: str, kv_cache: bool, ids: list[list[int]], batch_size: int) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    recipe = QuantizationModifier(
        targets="Linear", ignore=["lm_head"], scheme=scheme, kv_cache_scheme=KV if kv_cache else None
    )
    oneshot(
        model=model,
        dataset=rows,
        recipe=recipe,
        max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
        batch_size=batch_size,
        shuffle_calibration_samples=False,
        output_dir=out,
    )


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(**job)
