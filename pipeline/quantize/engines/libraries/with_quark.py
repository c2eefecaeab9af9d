"""Run one job with amd-quark 0.13: ``python -m quantmint.pipeline.quantize.engines.libraries.with_quark JOB.json``.

What it does not do by itself, or not rightly:

- Its path from file to file declares static scales without writing them and ignores algorithms: the model is resident.
- K is measured before the rotary embedding unless asked otherwise; servers cache it after.
- Experts that transformers holds stacked are left in 16 bit, and declared quantized, unless they are taken apart first.
- Keys of its configuration are sorted when they are written, so overlapping patterns change meaning: names are exact.
- It deletes the folder that it writes to, so that gets a fresh one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.quantize.engines.libraries.extensions import extensions_compiled_alone
from quantmint.pipeline.quantize.engines.libraries.job import (
    LibraryJob,
    UnfitError,
    linear_names,
    load_batches,
    load_model,
    require_modules,
    run_main,
)

_KV = ("k_proj", "v_proj")
_CACHE = ("FP8E4M3PerTensorSpec", {"observer_method": "min_max"})


def specs() -> Mapping[str, Mapping[str, Any]]:
    """Return Quark's settings by scheme: for ``weights`` and ``inputs`` a class with its arguments, or None."""
    table: dict[str, dict[str, Any]] = load_table(__file__, "quark.yaml")
    return table


def main(job: LibraryJob) -> None:
    """Quantize the job's model with Quark, and write the checkpoint to ``job.output``.

    Raises `UnfitError` where Quark cannot do the job with this model.
    """
    import torch

    with extensions_compiled_alone():
        from quark.torch import ModelQuantizer, export_safetensors
        from quark.torch.utils.llm.model_preparation import preprocess_for_quantization

    model = load_model(job, job.device)
    algorithm = _algorithm(job, str(model.config.model_type))
    preprocess_for_quantization(model)
    require_modules(model, job, "Quark")
    batches = [ids.to(job.device) for ids in load_batches(job)]
    quantizer = ModelQuantizer(_config(job, model, algorithm))
    model = quantizer.freeze(quantizer.quantize_model(model, batches or None))
    with torch.no_grad():
        export_safetensors(model, job.output)


def _algorithm(job: LibraryJob, model_type: str) -> list[Any] | None:
    from quark.torch.quantization.config.algo_configs import get_algo_config

    if job.algorithm == "none":
        return None
    settings: Any = get_algo_config(job.algorithm, model_type)  # Quark's own settings for the kind of model
    if settings is None:
        raise UnfitError(f"Quark has no settings of {job.algorithm} for models of type {model_type}")
    if job.algorithm == "gptq":
        # It rounds to the nearest what its settings leave out, and records the algorithm all the same.
        unlisted = [name for name in job.schemes if not name.endswith(tuple(settings.inside_layer_modules))]
        if unlisted:
            raise UnfitError(
                f"Quark's gptq leaves out {len(unlisted)} modules of a {model_type} model, {unlisted[0]} is the first; "
                "llm-compressor's does not"
            )
        ordered = bool(job.parameters["activation_order"])
        parameters = {"block_size": job.parameters["block_size"], "damp_percent": job.parameters["dampening"]}
        return [replace(settings, desc_act=ordered, static_groups=True, **parameters)]
    return [replace(settings, alpha=job.parameters["strength"])] if job.algorithm == "smoothquant" else [settings]


def _config(job: LibraryJob, model: Any, algorithm: list[Any] | None) -> Any:
    """Return Quark's configuration of the job, with ``algorithm`` as its algorithms.

    The global scheme is that of the most modules; modules of other schemes, and those left in 16 bit, are listed by
    name.
    """
    from quark.torch.quantization.config.config import QConfig, QLayerConfig

    layer = {scheme: _layer(scheme) for scheme in set(job.schemes.values())}
    default = job.default  # counts all modules whenever it is asked for
    layers = {name: layer[scheme] for name, scheme in job.schemes.items() if scheme != default}
    cache: dict[str, Any] = {}
    if job.kv_cache:
        output = _tensor(_CACHE)
        cached = {
            name: layer[job.schemes[name]] if name in job.schemes else QLayerConfig()
            for name in linear_names(model)
            if name.endswith(_KV)
        }
        # Quark takes what it finds for one module behind a pattern for what holds for all.
        if all(job.schemes.get(name) == default for name in cached):
            cached = {f"*{suffix}": layer[default] for suffix in _KV}
        cache = {
            name: QLayerConfig(weight=spec.weight, input_tensors=spec.input_tensors, output_tensors=output)
            for name, spec in cached.items()
        }
    return QConfig(
        global_quant_config=layer[default],
        layer_quant_config={**layers, **cache},
        kv_cache_quant_config=cache,
        kv_cache_group=[f"*{suffix}" for suffix in _KV] if job.kv_cache else [],
        kv_cache_post_rope=job.kv_cache,
        exclude=[name for name in linear_names(model) if name not in job.schemes],
        algo_config=algorithm,
    )


def _layer(scheme: str) -> Any:
    from quark.torch.quantization.config.config import QLayerConfig

    row = specs()[scheme]
    return QLayerConfig(weight=_tensor(row["weights"]), input_tensors=row["inputs"] and _tensor(row["inputs"]))


def _tensor(spec: Sequence[Any]) -> Any:
    from quark.torch.quantization.config import config

    kind, arguments = spec
    return getattr(config, kind)(**{"is_dynamic": False, **arguments}).to_quantization_spec()


if __name__ == "__main__":
    run_main(main)
