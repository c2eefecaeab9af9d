"""Quantize folders with amd-quark: the oracle for the Quark layout.

Reads a JSON list of jobs from the first argument; each has source, out, scheme, kv_cache, ids (rows of token ids),
model_type and from_file (Quark's own file-to-file path, which calibrates nothing). A process of its own, because
importing Quark takes ten seconds, without the scan that our own worker shortens, and compiles an extension.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from quantmint.pipeline.quantize.engines.libraries.extensions import extensions_compiled_alone

with extensions_compiled_alone():
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors


def run(
    source: str, out: str, scheme: str, kv_cache: bool, ids: list[list[int]], model_type: str, from_file: bool
) -> None:
    config: Any = LLMTemplate.get(model_type).get_config(scheme, kv_cache_scheme="fp8" if kv_cache else None)
    config.kv_cache_post_rope = kv_cache
    quantizer = ModelQuantizer(config)
    if from_file:
        quantizer.direct_quantize_checkpoint(source, out, device="cpu")
        return
    # The same attention that our calibration runs, so that ranges can be compared to the last bit.
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager")
    model = ModelQuantizer.freeze(quantizer.quantize_model(model, list(torch.tensor(ids).split(4))))
    with torch.no_grad():
        export_safetensors(model, out)


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(**job)
