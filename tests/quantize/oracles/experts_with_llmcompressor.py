"""Static FP8 of mixtures, and KV scales by head, with llm-compressor: the oracle for the inputs of experts.

Reads a JSON list of jobs from the first argument; each has source, out, ids (rows of token ids), batch_size,
every_token (whether every expert sees every token) and by_head. The model itself is run ("basic"): llm-compressor's
trace of some mixtures loses their causal mask. A process of its own, because llm-compressor patches what it imports.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer


def run(source: str, out: str, ids: list[list[int]], batch_size: int, every_token: bool, by_head: bool) -> None:
    whole = hasattr(AutoConfig.from_pretrained(source), "vision_config")
    loader: Any = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = loader.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager")
    cache = {
        "num_bits": 8,
        "type": "float",
        "strategy": "attn_head" if by_head else "tensor",
        "dynamic": False,
        "symmetric": True,
        "observer": "static_minmax",
    }
    # Latent attention has no K and V of its own to scale; Llama 4 asks the library's cache what it does not know.
    scaled = not hasattr(model.config, "kv_lora_rank") and not whole
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(source),
        recipe=QuantizationModifier(
            targets="Linear",
            scheme="FP8",
            ignore=["lm_head", "re:.*gate$", "re:.*router$", "re:.*vision.*", "re:.*multi_modal_projector.*"],
            kv_cache_scheme=cache if scaled else None,
        ),
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}),
        max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
        batch_size=batch_size,
        shuffle_calibration_samples=False,
        moe_calibrate_all_experts=every_token,
        pipeline="basic",
        output_dir=out,
    )


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(**job)
