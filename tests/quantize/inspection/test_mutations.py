"""Every way to harm a checkpoint that we thought of, and the rule that catches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.layout import layout
from quantmint.pipeline.quantize.inspection.findings import Inspection
from quantmint.pipeline.quantize.inspection.inspect import Expectations, inspect_checkpoint

FORMATS = ("compressed-tensors", "quark")
MODULE = "model.layers.1.mlp.up_proj"
WEIGHT, SCALE = f"{MODULE}.weight", f"{MODULE}.weight_scale"
ATTENTION = "model.layers.0.self_attn"
NORM = "model.layers.0.input_layernorm.weight"


def k_scale(broken: Any) -> str:
    return layout(broken.quantization["quant_method"]).kv_scale_names(ATTENTION)[0]


def v_scale(broken: Any) -> str:
    return layout(broken.quantization["quant_method"]).kv_scale_names(ATTENTION)[1]


def fill(name: str, value: float, *, only_first: bool = False) -> Callable[[Any], None]:
    def mutate(broken: Any) -> None:
        tensor = broken.tensors[name]
        (tensor.reshape(-1)[:1] if only_first else tensor).fill_(value)

    return mutate


def fill_k(value: float) -> Callable[[Any], None]:
    return lambda broken: broken.tensors[k_scale(broken)].fill_(value)


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def mutate(broken: Any) -> None:
        broken.tensors[name] = change(broken.tensors[name]).contiguous()

    return mutate


def put_k(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    return lambda broken: put(k_scale(broken), change)(broken)


def drop(*names: str) -> Callable[[Any], None]:
    return lambda broken: [broken.tensors.pop(name) for name in names]


def byte(name: str, value: int) -> Callable[[Any], None]:
    def mutate(broken: Any) -> None:
        broken.tensors[name].view(torch.uint8)[3, 7] = value

    return mutate


def add(name: str, tensor: torch.Tensor) -> Callable[[Any], None]:
    return lambda broken: broken.tensors.update({name: tensor})


def ignore(name: str) -> Callable[[Any], None]:
    return lambda broken: broken.kept().append(name)


def claim_head(broken: Any) -> None:
    broken.kept().remove("lm_head")


def unclaim_cache(broken: Any) -> None:
    if "kv_cache_scheme" in broken.quantization:
        broken.quantization["kv_cache_scheme"] = None
    else:
        broken.quantization["export"]["kv_cache_group"] = []


def exchange_cache_scales(broken: Any) -> None:
    k, v = k_scale(broken), v_scale(broken)
    broken.tensors[k], broken.tensors[v] = broken.tensors[v], broken.tensors[k]


def claim_int8(broken: Any) -> None:
    if "config_groups" in broken.quantization:
        broken.quantization["config_groups"]["group_0"]["weights"]["type"] = "int"
    else:
        broken.quantization["layer_quant_config"] = {}
        broken.quantization["global_quant_config"]["weight"]["dtype"] = "int3"


def claim_static_inputs(broken: Any) -> None:
    if "config_groups" in broken.quantization:
        group = broken.quantization["config_groups"]["group_0"]
        group["weights"]["strategy"] = group["input_activations"]["strategy"] = "tensor"
        group["input_activations"]["dynamic"] = False
    else:
        broken.quantization["layer_quant_config"] = {}
        for spec in ("weight", "input_tensors"):
            broken.quantization["global_quant_config"][spec] |= {"qscheme": "per_tensor", "is_dynamic": False}


def unquantize_in_secret(broken: Any) -> None:
    """Two modules in 16 bit, scales and all removed, which no line of the configuration tells."""
    for module in (MODULE, "model.layers.0.mlp.up_proj"):
        broken.tensors[f"{module}.weight"] = torch.randn(256, 128).bfloat16()
        del broken.tensors[f"{module}.weight_scale"]


# what was done: (rule, part of where, the change)
MUTATIONS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "scale of zero": ("bad scale", SCALE, fill(SCALE, 0.0, only_first=True)),
    "scale of NaN": ("bad scale", SCALE, fill(SCALE, float("nan"), only_first=True)),
    "negative scale": ("bad scale", SCALE, fill(SCALE, -0.01, only_first=True)),
    "scales of a layer times 4": ("error too large", MODULE, put(SCALE, lambda t: t * 4)),
    "scales in another order": ("error too large", MODULE, put(SCALE, lambda t: t.flip(0))),
    "weights of another layer": (
        "error too large",
        MODULE,
        lambda b: b.tensors.update({WEIGHT: b.tensors["model.layers.0.mlp.up_proj.weight"].clone()}),
    ),
    "scale missing": ("missing scale", SCALE, drop(SCALE)),
    "scale as 64-bit floats": ("wrong dtype", SCALE, put(SCALE, lambda t: t.double())),
    "weight missing": ("not quantized", WEIGHT, drop(WEIGHT)),
    "weight in 16 bit": ("not quantized", WEIGHT, put(WEIGHT, lambda t: t.bfloat16())),
    "weights in 16 bit in secret": ("not quantized", WEIGHT, unquantize_in_secret),
    "weight as the other FP8": ("wrong dtype", WEIGHT, put(WEIGHT, lambda t: t.view(torch.float8_e5m2))),
    "weight transposed": ("wrong shape", WEIGHT, put(WEIGHT, lambda t: t.t())),
    "weight with a NaN": ("not finite", WEIGHT, byte(WEIGHT, 0x7F)),
    "cache scale of 1": ("default scale", "k_", fill_k(1.0)),
    "cache scale of zero": ("bad scale", "k_", fill_k(0.0)),
    "cache scale of NaN": ("bad scale", "k_", fill_k(float("nan"))),
    "cache scale missing": ("missing scale", "k_", lambda b: b.tensors.pop(k_scale(b))),
    "cache scale one step off": ("wrong scale", "k_", put_k(lambda t: (t.view(torch.int16) + 1).view(t.dtype))),
    "cache scales exchanged": ("wrong scale", "v_", exchange_cache_scales),
    "cache scale for two heads": ("wrong shape", "k_", put_k(lambda t: t.reshape(1).repeat(2))),
    "cache scale as a byte": ("wrong dtype", "k_", put_k(lambda t: torch.ones_like(t, dtype=torch.uint8))),
    "cache not declared": ("undeclared", "k_", unclaim_cache),
    "scale that nobody declared": ("undeclared", "q_scale", add(f"{ATTENTION}.q_scale", torch.ones(1).bfloat16())),
    "input scale that nobody declared": ("undeclared", "input_scale", add(f"{MODULE}.input_scale", torch.ones(()))),
    "tensor that the source lacks": ("undeclared", "extra", add("model.extra", torch.ones(1))),
    "quantized though ignored": ("undeclared", WEIGHT, ignore(MODULE)),
    "nothing is quantized": ("not quantized", "", ignore("re:.*")),
    "head claimed": ("not quantized", "lm_head.weight", claim_head),
    "scheme that nobody knows": ("unknown scheme", MODULE, claim_int8),
    "static inputs claimed": ("missing scale", "input_scale", claim_static_inputs),
    "norm altered in one bit": ("altered", NORM, put(NORM, lambda t: t + t.new_tensor([0.01] + [0] * 127))),
    "embedding in 32 bit": ("altered", "embed_tokens", put("model.embed_tokens.weight", lambda t: t.float())),
    "norm missing": ("missing", NORM, drop(NORM)),
}  # fmt: skip


def inspect(made: Any, folder: Any, **changes: Any) -> Inspection:
    expected = Expectations(
        changes.pop("expected_scales", made.expected_scales) or {},
        changes.pop("expected_bytes", made.checkpoint.nbytes),
        changes.pop("proven", None),
        changes.pop("outputs", {}),
    )
    arguments = {"source": made.source, **changes}
    return inspect_checkpoint(open_checkpoint(folder), made.structure, expected=expected, **arguments)


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_what_was_not_harmed_passes(
    quantize: Callable[..., Any], breakable: Callable[..., Any], checkpoint_format: str
) -> None:
    made = quantize("llama", checkpoint_format)
    inspection = inspect(made, breakable(made.folder).save())
    assert inspection.findings == ()
    assert inspection.quantized_modules == len(inspection.layers) == 14
    assert dict(inspection.kv_scales) == dict(made.expected_scales)
    assert sum(inspection.bytes_by_part.values()) == made.checkpoint.nbytes
    assert all(29 < layer.sqnr_db < 34 for layer in inspection.layers)


def errors_of(inspection: Inspection) -> dict[str, float]:
    """What an engine would have measured while it wrote."""
    return {layer.module: layer.sqnr_db for layer in inspection.layers}


@pytest.mark.parametrize("checkpoint_format", FORMATS)
@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("written_so", [False, True], ids=["harmed later", "written so"])
def test_harm_is_caught_by_its_rule(
    quantize: Callable[..., Any], breakable: Callable[..., Any], checkpoint_format: str, name: str, written_so: bool
) -> None:
    """Also where an engine wrote it so, and measured what it believed: the head of every tensor is read again."""
    rule, where, mutate = MUTATIONS[name]
    made = quantize("llama", checkpoint_format)
    broken = breakable(made.folder)
    mutate(broken)
    broken.save()
    proven = errors_of(inspect(made, made.folder)) if written_so else None
    inspection = inspect(made, broken.folder, proven=proven)
    assert not inspection.passed
    hits = [finding for finding in inspection.findings if finding.rule == rule and where in finding.where]
    assert hits, inspection.findings
    assert rule in inspection.summary()
    assert inspection.to_json()["verdict"] == "FAIL"


def test_what_was_proven_while_it_was_written_is_not_measured_again(quantize: Callable[..., Any]) -> None:
    made = quantize("llama", "compressed-tensors")
    measured = inspect(made, made.folder)
    known = {module: sqnr + 1 for module, sqnr in errors_of(measured).items()}
    proven = inspect(made, made.folder, proven=known)
    assert errors_of(proven) == known
    assert replace(proven, layers=measured.layers) == measured


def test_outputs_that_are_noise_are_caught_whatever_the_weights_say(quantize: Callable[..., Any]) -> None:
    made = quantize("llama", "compressed-tensors")
    known = errors_of(inspect(made, made.folder))
    assert inspect(made, made.folder, proven=known, outputs={MODULE: 20.0}).passed
    (finding,) = inspect(made, made.folder, proven=known, outputs={MODULE: 13.0}).findings
    assert (finding.rule, finding.where) == ("error too large", MODULE)
    assert "13.0 dB of its outputs" in finding.message


def test_a_module_in_16_bit_that_the_configuration_claims_is_caught(
    quantize: Callable[..., Any], breakable: Callable[..., Any]
) -> None:
    """The reverse: here the file is as the recipe wished, and the configuration lies."""
    from safetensors.torch import load_file

    made = quantize("llama", "compressed-tensors")
    broken = breakable(made.folder)
    broken.tensors[WEIGHT] = load_file(made.source.folder / "model.safetensors")[WEIGHT]
    del broken.tensors[SCALE]
    broken.kept().append(MODULE)
    honest = inspect(made, broken.save(), expected_bytes=None)
    assert [finding.rule for finding in honest.findings] == ["split"]  # vLLM loads q, k and v as one
    assert honest.quantized_modules == 13
    broken.kept().remove(MODULE)
    lying = inspect(made, broken.save(), expected_bytes=None)
    assert {(finding.rule, finding.where) for finding in lying.findings} == {
        ("not quantized", WEIGHT),
        ("missing scale", SCALE),
    }


def test_a_size_that_was_not_predicted_is_caught(quantize: Callable[..., Any]) -> None:
    made = quantize("llama", "quark")
    found = inspect(made, made.folder, expected_bytes=made.checkpoint.nbytes - 1).findings
    assert [finding.rule for finding in found] == ["size"]


def test_scales_of_one_are_accepted_where_they_are_asked_for(
    quantize: Callable[..., Any], breakable: Callable[..., Any]
) -> None:
    made = quantize("llama", "quark")
    broken = breakable(made.folder)
    for attention in made.structure.attention:
        for name in layout("quark").kv_scale_names(attention):
            broken.tensors[name].fill_(1.0)
    broken.save()
    assert inspect(made, broken.folder, expected_scales=None, allow_unit_kv_scales=True).passed
    assert len(inspect(made, broken.folder, expected_scales=None).findings) == 4


def test_without_the_source_structure_and_numbers_are_still_checked(
    quantize: Callable[..., Any], breakable: Callable[..., Any]
) -> None:
    made = quantize("llama", "quark")
    bare: dict[str, Any] = {"source": None, "expected_scales": None, "expected_bytes": None}
    inspection = inspect(made, made.folder, **bare)
    assert inspection.passed
    assert inspection.layers == ()
    assert not inspection.compared_with_source
    broken = breakable(made.folder)
    byte(WEIGHT, 0x7F)(broken)
    assert [finding.rule for finding in inspect(made, broken.save(), **bare).findings] == ["not finite"]


def test_the_record_is_json_even_where_numbers_are_not(
    quantize: Callable[..., Any], breakable: Callable[..., Any]
) -> None:
    import json

    made = quantize("llama", "compressed-tensors")
    broken = breakable(made.folder)
    fill_k(float("nan"))(broken)
    inspection = inspect(made, broken.save())
    json.dumps(inspection.to_json(), allow_nan=False)
    exact = replace(inspection, layers=(replace(inspection.layers[0], sqnr_db=float("inf")),))
    assert json.loads(json.dumps(exact.to_json(), allow_nan=False))["layers"][0]["sqnr_db"] is None
