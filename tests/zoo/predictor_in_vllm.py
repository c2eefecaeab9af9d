"""Ask vLLM which tensors of a checkpoint its class for multi-token prediction loads, and which of its own get none.

    .venv-vllm/bin/python tests/zoo/predictor_in_vllm.py FOLDER... > answers.jsonl

The script runs in vLLM's environment and imports nothing of quantmint. The classes of the model and of its predictor
are built on the meta device as on an Instinct GPU, with the quantization that the folder declares: it passes through
the model's renames before the predictor asks it, as in a server. Then the predictor's own ``load_weights`` gets all
tensors of the folder, without their numbers. A line of the output is a JSON object: folder; methods, the classes of the
methods of modules with a quantization, by module; missing, parameters that no tensor reaches; error, null or a line.
"""

from __future__ import annotations

import copy
import json
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

for _variable, _value in {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_variable, _value)

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import vllm_builder  # noqa: E402 - it is found beside this script

_DTYPES = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and shape of each tensor of a folder, as a tensor on the meta device."""
    import torch

    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, info in header.items():
            if name != "__metadata__":
                dtype = getattr(torch, _DTYPES[info["dtype"]])
                yield name, torch.empty(info["shape"], dtype=dtype, device="meta")


def answer(builder: vllm_builder.Builder, folder: Path) -> dict[str, Any]:
    """Return the line for a folder."""
    from vllm.config import DeviceConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.model_executor.model_loader.utils import initialize_model

    target = builder.configure(folder).model_config
    speculative = SpeculativeConfig(
        method="mtp", num_speculative_tokens=1, target_model_config=target, target_parallel_config=ParallelConfig()
    )
    config = VllmConfig(model_config=target, device_config=DeviceConfig("cpu"), speculative_config=speculative)
    draft = copy.deepcopy(speculative.draft_model_config)
    with vllm_builder.tensors_on("meta"):
        initialize_model(config)
        config.compilation_config.static_forward_context.clear()
        model = initialize_model(config, model_config=draft)
    parameters = dict(model.named_parameters())
    line: dict[str, Any] = {"folder": str(folder), "methods": {}, "missing": sorted(parameters), "error": None}
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None))
        classes = " ".join(kind.__name__ for kind in method.__mro__)
        if not any(word in classes for word in ("Unquantized", "KVCache", "NoneType")):
            line["methods"][name] = method.__name__
    try:
        loaded = model.load_weights(tensors(folder))
        # Scales of a cache have a value where a checkpoint has none.
        line["missing"] = sorted(name for name in parameters.keys() - set(loaded) if ".attn." not in name)
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return line


def emulate_mxfp4() -> None:
    """Let vLLM choose its emulation of MXFP4 without amd-quark, whose kernels nothing here calls."""
    from vllm.model_executor.kernels.linear.mxfp4 import emulation
    from vllm.model_executor.layers.fused_moe.experts import ocp_mx_emulation_moe

    emulation.has_quark = ocp_mx_emulation_moe.has_quark = lambda: True


def main(folders: Sequence[str]) -> None:
    """Print a line for each folder."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints
    builder = vllm_builder.Builder()
    emulate_mxfp4()
    for folder in folders:
        output.write(json.dumps(answer(builder, Path(folder))) + "\n")
        output.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
