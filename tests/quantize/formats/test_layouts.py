from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.schemes import table
from quantmint.pipeline.quantize.formats.checkpoint import tensor_bytes
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.formats.layout import layout, layout_of, stores, weight_tensors

Golden = Callable[[str], dict[str, Any]]

PARTS = (
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
)
LINEAR = tuple(f"model.layers.{layer}.{part}" for layer in range(2) for part in PARTS)
FORMATS = ("compressed-tensors", "quark")
# What the libraries wrote for the tiny Llama: file, scheme, static FP8 cache.
LIBRARIES = [
    ("llmcompressor-ptpc_fp8-kv", "ptpc_fp8", True),
    ("llmcompressor-fp8-kv", "fp8", True),
    ("llmcompressor-fp8_block", "fp8_block", False),
    ("llmcompressor-mxfp4", "mxfp4", False),
    ("llmcompressor-mxfp4_weight_only", "mxfp4_weight_only", False),
    ("llmcompressor-int8_w8a8", "int8_w8a8", False),
    ("llmcompressor-mxfp8", "mxfp8", False),
    ("llmcompressor-w4a16", "w4a16", False),
    ("quark-fp8-kv", "fp8", True),
    ("quark-mxfp4", "mxfp4", False),
    ("quark-mxfp4_weight_only", "mxfp4_weight_only", False),
    ("quark-mxfp4_fp8", "mxfp4_fp8", False),
    ("quark-mxfp6_e2m3", "mxfp6_e2m3", False),
    ("quark-mxfp6_e3m2", "mxfp6_e3m2", False),
    ("quark-int8_w8a8", "int8_w8a8", False),
    ("quark-w4a16", "w4a16", False),
    ("quark-file-fp8", "fp8", False),
    ("quark-file-ptpc_fp8", "ptpc_fp8", False),
]


def on_disk(config: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file whose keys were sorted, as both libraries and we do."""
    loaded: dict[str, Any] = json.loads(json.dumps(config, sort_keys=True))
    return loaded


@pytest.mark.parametrize(("name", "scheme", "kv_cache"), LIBRARIES)
def test_we_write_the_librarys_configuration(golden: Golden, name: str, scheme: str, kv_cache: bool) -> None:
    written = golden(name)
    choice = Choice(dict.fromkeys(LINEAR, scheme), ("lm_head",), kv_cache)
    assert on_disk(layout(written["quant_method"]).quantization_config(choice)) == written


@pytest.mark.parametrize(("name", "scheme", "kv_cache"), LIBRARIES)
def test_we_read_the_librarys_configuration(golden: Golden, name: str, scheme: str, kv_cache: bool) -> None:
    config = golden(name)
    claims = layout_of({"quantization_config": config}).claims(config, [*LINEAR, "lm_head"])
    assert claims.schemes == {**dict.fromkeys(LINEAR, scheme), "lm_head": None}
    assert claims.unknown == {}
    assert claims.kv_cache is kv_cache


@pytest.mark.parametrize("checkpoint_format", FORMATS)
@given(data=st.data(), kv_cache=st.booleans())
def test_what_is_written_is_read_back_module_by_module(
    checkpoint_format: str, data: st.DataObject, kv_cache: bool
) -> None:
    known = [name for name in table() if stores(checkpoint_format, name)]
    assigned = {module: data.draw(st.sampled_from([*known, None]), label=module) for module in LINEAR}
    assigned[LINEAR[0]] = assigned[LINEAR[0]] or known[0]
    schemes = {module: scheme for module, scheme in assigned.items() if scheme is not None}
    kept = ("lm_head", *(module for module in LINEAR if module not in schemes))
    form = layout(checkpoint_format)
    config = on_disk(form.quantization_config(Choice(schemes, kept, kv_cache)))
    claims = form.claims(config, [*LINEAR, "lm_head"])
    assert claims.schemes == {**assigned, "lm_head": None}
    assert claims.unknown == {}
    assert claims.kv_cache is kv_cache


@pytest.mark.parametrize("name", ["llmcompressor-ptpc_fp8-kv", "quark-fp8-kv"])
def test_a_setting_that_is_in_no_table_is_unknown_and_not_guessed(golden: Golden, name: str) -> None:
    config = copy.deepcopy(golden(name))
    if name.startswith("quark"):
        config["layer_quant_config"] = {}
        config["global_quant_config"]["weight"]["dtype"] = "int4"
    else:
        config["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    claims = layout(config["quant_method"]).claims(config, [LINEAR[0]])
    assert claims.schemes == {LINEAR[0]: None}
    assert "4" in claims.unknown[LINEAR[0]]


@pytest.mark.parametrize(("ignore", "kept"), [([], 0), (["re:.*mlp.*"], 6), ([LINEAR[3]], 1), (["Linear"], 14)])
def test_compressed_tensors_ignores_by_name_by_pattern_and_by_class(
    golden: Golden, ignore: list[str], kept: int
) -> None:
    config = {**golden("llmcompressor-ptpc_fp8-kv"), "ignore": ignore}
    claims = layout("compressed-tensors").claims(config, LINEAR)
    assert list(claims.schemes.values()).count(None) == kept


@pytest.mark.parametrize(("exclude", "kept"), [(None, 0), (["re:.*mlp.*"], 6), ([LINEAR[3]], 1), (["*o_proj"], 2)])
def test_quark_excludes_by_name_and_by_pattern(golden: Golden, exclude: list[str] | None, kept: int) -> None:
    config = {**golden("quark-fp8-kv"), "exclude": exclude}
    assert list(layout("quark").claims(config, LINEAR).schemes.values()).count(None) == kept


@pytest.mark.parametrize(
    ("keys", "unknown"),
    [
        ({LINEAR[0]: "strange", "*down_proj": "known"}, [LINEAR[0]]),
        ({"*down_proj": "known", LINEAR[0]: "strange"}, []),
        ({"*down_proj": "strange", LINEAR[0]: "known"}, [name for name in LINEAR if name.endswith("down_proj")]),
        ({"other": "known", "*.1.*": "strange"}, [name for name in LINEAR if ".1." in name]),
    ],
)
def test_of_quarks_layer_settings_the_first_that_match_hold(
    golden: Golden, keys: dict[str, str], unknown: list[str]
) -> None:
    config = golden("quark-fp8-kv")
    settings = {"known": config["global_quant_config"], "strange": {"weight": {"dtype": "int3"}}}
    layers = {key: settings[which] for key, which in keys.items()}
    claims = layout("quark").claims({**config, "exclude": [], "layer_quant_config": layers}, LINEAR)
    assert list(claims.unknown) == unknown


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_tens_of_thousands_of_modules_are_no_matter_of_minutes(checkpoint_format: str) -> None:
    """Where each module was compared with each name, 45,000 of them took hours."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(256)]
    schemes = {name: ("fp8", "ptpc_fp8")[number % 2] for number, name in enumerate(names)}
    form, kept = layout(checkpoint_format), tuple(f"{name}.kept" for name in names)
    began = time.process_time()
    claims = form.claims(form.quantization_config(Choice(schemes, kept, False)), [*names, *kept])
    assert time.process_time() - began < 20
    assert claims.schemes == {**schemes, **dict.fromkeys(kept)}


def test_a_model_that_is_not_quantized_has_no_layout() -> None:
    with pytest.raises(UserError, match="no quantization_config"):
        layout_of({})


@pytest.mark.parametrize("method", ["gptq", None, "bitsandbytes"])
def test_a_layout_of_others_is_refused_by_name(method: str | None) -> None:
    with pytest.raises(UserError, match="compressed-tensors, quark"):
        layout_of({"quantization_config": {"quant_method": method}})


@pytest.mark.parametrize("checkpoint_format", FORMATS)
@given(rows=st.integers(1, 75), groups=st.integers(1, 20))
def test_stored_tensors_weigh_what_the_scheme_promises(checkpoint_format: str, rows: int, groups: int) -> None:
    for name, scheme in table().items():
        if not stores(checkpoint_format, name):
            continue
        shape = (8 * rows, groups * max(scheme.input_divisor, 32))  # the words of INT4 hold eight numbers
        tensors = weight_tensors(checkpoint_format, name, "m", shape, "BF16")
        weights = sum(part.nbytes for part in tensors if part.role in ("weight", "weight_packed"))
        assert 8 * weights == scheme.weight.bits * shape[0] * shape[1]
        assert all(part.nbytes == tensor_bytes(part.dtype, part.shape) for part in tensors)
        assert all(part.name == f"m.{part.role}" for part in tensors)
        (scale,) = (part for part in tensors if part.role == "weight_scale")
        assert scale.dtype == {"bf16": "BF16", "e8m0": "U8", "e4m3": "F8_E4M3"}[scheme.weight.scale]


def test_a_scheme_without_a_layout_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(UserError, match=r"no layout for int3; it has: .*ptpc_fp8"):
        weight_tensors("quark", "int3", "m", (1, 1), "BF16")


def test_settings_that_are_left_out_are_what_compressed_tensors_takes_them_for() -> None:
    """A group with 8 bits and no type is INT8, and was taken for FP8."""
    from compressed_tensors.quantization import QuantizationArgs

    def claimed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> str | None:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
        return layout_of({"quantization_config": config}).claims(config, ["a.q_proj"]).schemes["a.q_proj"]

    plain = QuantizationArgs().model_dump(mode="json")
    short = {"num_bits": 8}
    assert claimed(short, short) == claimed(plain, plain)
    assert claimed(short, short) not in ("fp8", "ptpc_fp8")
    token = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    assert claimed({**short, "group_size": -1}, token) == "int8_w8a8"
    assert claimed({**short, "type": "float", "group_size": -1}, {**token, "type": "float"}) == "ptpc_fp8"
