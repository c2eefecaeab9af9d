"""Run one job with llm-compressor 0.14.

    python -m quantmint.pipeline.quantize.engines.libraries.with_llmcompressor JOB.json

What it does not do by itself, or not rightly:

- KV scales are taken by an average that depends on the samples' order; `static_minmax` is the largest magnitude.
- Its layer-wise pipeline traces the model, and loses the causal mask where the mask is made by a function that the
  configuration picks (Mixtral, Qwen3 MoE, Phi-3): scales from the second layer on are wrong by a tenth. A mask of four
  dimensions in every batch is passed on as it is. Where no error has to be carried from layer to layer, the whole
  model is run instead, which is one forward and not two.
- AWQ pins memory, which a machine without an accelerator cannot.
- AutoRound turns the whole model into float32 on a processor without bfloat16 instructions, and leaves it so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantmint.pipeline.quantize.engines.libraries.job import (
    LibraryJob,
    linear_names,
    load_batches,
    load_model,
    require_modules,
    run_main,
)

if TYPE_CHECKING:
    import torch

PRESETS = {
    "ptpc_fp8": "FP8_DYNAMIC",
    "fp8": "FP8",
    "fp8_block": "FP8_BLOCK",
    "mxfp4": "MXFP4",
    "mxfp4_weight_only": "MXFP4A16",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "nvfp4_weight_only": "NVFP4A16",
    "int8_w8a8": "INT8",
    "w4a16": "W4A16",
}
#: Algorithms that see each layer's inputs as the quantized layers before it leave them.
LAYER_WISE = frozenset({"gptq", "awq", "smoothquant", "autoround"})
_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_SHARD = "5GB"


def main(job: LibraryJob) -> None:
    """Quantize the job's model with llm-compressor, and write the checkpoint to ``job.output``.

    Raises `UnfitError` where the library cannot quantize one of the job's modules.
    """
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader

    layer_wise = job.algorithm in LAYER_WISE
    # Layer by layer the library itself brings each layer to the accelerator.
    model = load_model(job, "cpu" if layer_wise else job.device)
    linearize_moe(model)
    require_modules(model, job, "llm-compressor")
    dtype, dtypes = model.dtype, {name: parameter.dtype for name, parameter in model.named_parameters()}
    batches: Any = [_batch(ids, model.dtype, masked=layer_wise) for ids in load_batches(job)]
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_, **__: None
    oneshot(
        model=model,
        recipe=_modifiers(job, model),
        dataset=DataLoader(batches, batch_size=None) if batches else None,
        pipeline="sequential" if layer_wise else "basic" if batches else "datafree",
        moe_calibrate_all_experts=True,
        trust_remote_code_model=job.trust_remote_code,
    )
    if job.algorithm == "autoround":
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtypes.get(name, dtype))
    model.save_pretrained(job.output, max_shard_size=_SHARD)


def _batch(ids: torch.Tensor, dtype: torch.dtype, *, masked: bool) -> dict[str, torch.Tensor]:
    """Return token ids of [batch, n] with an attention mask: ones, [batch, n], or the causal mask, [batch, 1, n, n].

    The causal mask, in ``dtype``, is made where ``masked`` is set.
    """
    import torch

    if not masked:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    count, length = ids.shape
    causal = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)
    return {"input_ids": ids, "attention_mask": causal[None, None].expand(count, 1, -1, -1).contiguous()}


def _modifiers(job: LibraryJob, model: Any) -> list[Any]:
    """Return llm-compressor's modifiers for the job: transforms first, then the one that rounds.

    Several schemes target modules by exact names, so that no order of patterns can matter.
    """
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    used = sorted(set(job.schemes.values()), key=lambda scheme: (scheme != job.default, scheme))
    groups = {
        f"group_{number}": preset_name_to_scheme(
            PRESETS[scheme],
            ["Linear"] if len(used) == 1 else [name for name, chosen in job.schemes.items() if chosen == scheme],
        )
        for number, scheme in enumerate(used)
    }
    rounding: dict[str, Any] = {
        "config_groups": groups,
        "ignore": [name for name in linear_names(model) if name not in job.schemes],
        "kv_cache_scheme": {**_KV, "observer": "static_minmax"} if job.kv_cache else None,
    }
    parameters = job.parameters
    if job.algorithm == "gptq":
        order = "static" if parameters["activation_order"] else None
        own = {"dampening_frac": parameters["dampening"], "block_size": parameters["block_size"], "actorder": order}
        return [GPTQModifier(**rounding, **own)]
    if job.algorithm == "autoround":
        from llmcompressor.modifiers.autoround import AutoRoundModifier

        return [AutoRoundModifier(**rounding, iters=parameters["iterations"])]
    from llmcompressor.modifiers.transform import SpinQuantModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    transforms: list[Any] = []
    if job.algorithm == "awq":
        transforms = [AWQModifier()]
    elif job.algorithm == "smoothquant":
        transforms = [SmoothQuantModifier(smoothing_strength=parameters["strength"])]
    elif job.algorithm == "rotation":
        # R1 and R2 are merged into the weights; R3 and R4 would have to be computed again for every token.
        transforms = [SpinQuantModifier(rotations=["R1", "R2"])]
    return [*transforms, QuantizationModifier(**rounding)]


if __name__ == "__main__":
    run_main(main)
