"""What the headers alone prove: every promised tensor is there, in its dtype and shape, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.formats.checkpoint import Checkpoint
from pipeline.formats.header import SIXTEEN_BIT
from pipeline.formats.layout import Claims, layout_of
from pipeline.formats.tensors import StoredTensor, weight_tensors
from pipeline.inspection.findings import Finding
from pipeline.model.structure import Structure

_SCALE_DTYPES = ("BF16", "F16", "F32")
_PACKED = "weight_packed"
_QUANTIZED_ONLY = ("_scale", "_zero_point", _PACKED, "weight_shape", "weight_g_idx")


def expected_tensors(
    checkpoint: Checkpoint, structure: Structure, claims: Claims
) -> dict[str, tuple[StoredTensor, ...]]:
    """What the configuration promises, by module; a scale may have any of the dtypes that the libraries give it."""
    form = layout_of(checkpoint.config)
    expected: dict[str, tuple[StoredTensor, ...]] = {}
    for module, shape in structure.linear.items():
        scheme = claims.schemes.get(module)
        if scheme is not None:
            tensors = weight_tensors(form.name, scheme, module, shape, _scale_dtype(checkpoint, module, "weight_scale"))
            expected[module] = tuple(
                replace(stored, dtype=_scale_dtype(checkpoint, module, stored.role))
                if stored.role == "input_scale"
                else stored
                for stored in tensors
            )
    return expected


def check_structure(checkpoint: Checkpoint, structure: Structure, claims: Claims) -> Iterator[Finding]:
    """Hold the promise against the headers, both ways."""
    form = layout_of(checkpoint.config)
    expected = expected_tensors(checkpoint, structure, claims)
    for module, reason in claims.unknown.items():
        yield Finding("unknown scheme", module, f"its configuration ({reason}) is no scheme that quantmint knows")
    for tensors in expected.values():
        for stored in tensors:
            yield from _check_tensor(checkpoint, stored)
    promised = {stored.name for tensors in expected.values() for stored in tensors}
    if claims.kv_cache:
        for attention in structure.attention:
            for name in form.kv_scale_names(attention):
                promised.add(name)
                yield from _check_kv_tensor(checkpoint, name)
    for module in structure.kept:
        entry = checkpoint.tensors.get(f"{module}.weight")
        if claims.schemes.get(module) is not None and entry is not None and entry[1].dtype in SIXTEEN_BIT:
            message = f"it is {entry[1].dtype}, the configuration does not keep it in 16 bit"
            yield Finding("not quantized", f"{module}.weight", message)
    sixteen = [m for m in (*structure.linear, *structure.kept) if m not in expected and m not in claims.unknown]
    for module in sixteen:
        yield from _check_sixteen_bit(checkpoint, module)
    for name in checkpoint.tensors:
        extra = name.endswith(_QUANTIZED_ONLY) and name not in promised
        if extra and name.rpartition(".")[0] not in claims.unknown:
            yield Finding("undeclared", name, "it is stored, but the configuration does not declare it")


def _scale_dtype(checkpoint: Checkpoint, module: str, role: str) -> str:
    entry = checkpoint.tensors.get(f"{module}.{role}")
    return entry[1].dtype if entry is not None and entry[1].dtype in _SCALE_DTYPES else "BF16"


def _check_tensor(checkpoint: Checkpoint, stored: StoredTensor) -> Iterator[Finding]:
    entry = checkpoint.tensors.get(stored.name)
    if entry is None:
        rule = "missing scale" if stored.role.endswith("_scale") else "not quantized"
        yield Finding(rule, stored.name, f"{stored.dtype} {list(stored.shape)} is declared, but not stored")
        return
    info = entry[1]
    if info.dtype != stored.dtype:
        rule = "not quantized" if info.dtype in SIXTEEN_BIT and stored.role == "weight" else "wrong dtype"
        yield Finding(rule, stored.name, f"it is {info.dtype}, the configuration promises {stored.dtype}")
    elif info.shape != stored.shape:
        yield Finding("wrong shape", stored.name, f"it is {list(info.shape)}, expected {list(stored.shape)}")


def _check_kv_tensor(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    entry = checkpoint.tensors.get(name)
    scheme = checkpoint.config["quantization_config"].get("kv_cache_scheme") or {}
    if entry is None:
        yield Finding("missing scale", name, "a static FP8 KV cache is declared, its scale is not stored")
    elif entry[1].dtype not in _SCALE_DTYPES:
        yield Finding("wrong dtype", name, f"it is {entry[1].dtype}, a KV scale is one of {', '.join(_SCALE_DTYPES)}")
    elif entry[1].parameters != 1 and (scheme.get("strategy") != "attn_head" or not entry[1].parameters):
        yield Finding("wrong shape", name, f"it is {list(entry[1].shape)}, expected a single KV scale")


def _check_sixteen_bit(checkpoint: Checkpoint, module: str) -> Iterator[Finding]:
    entry = checkpoint.tensors.get(f"{module}.weight")
    if entry is not None and entry[1].dtype not in (*SIXTEEN_BIT, "F32"):
        yield Finding("undeclared", f"{module}.weight", f"it is {entry[1].dtype}, the configuration keeps it in 16 bit")
