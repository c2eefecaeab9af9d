"""The findings of an inspection, and the checks of headers: every promised tensor is there, and no other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quantmint.pipeline.quantize.formats.checkpoint import SIXTEEN_BIT, Checkpoint
from quantmint.pipeline.quantize.formats.layout import Claims, StoredTensor, layout_of, weight_tensors
from quantmint.pipeline.quantize.model.loader import LoaderView, fusion_names, load_view
from quantmint.pipeline.quantize.model.structure import OUTPUT_HEAD, UNQUANTIZED, Structure

INSPECTION = "inspection.json"
"""The file that an inspection is kept in, in the store and in the evidence of a release."""


@dataclass(frozen=True, slots=True)
class InspectionFinding:
    """A contradiction found by an inspection; ``rule`` is its short name, ``where`` a tensor, a module or a file."""

    rule: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class LayerError:
    """The rounding error of one quantized weight against its 16-bit source.

    ``sqnr_db`` is 10 log10(sum w^2 / sum (w - q)^2), dB.
    """

    module: str
    scheme: str
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of an inspection: findings, errors of quantized weights, sizes and KV scales.

    ``bytes_by_part`` are the bytes of "quantized weights", "scales" and "16 bit"; ``kv_scales`` the scales that are one
    number, by tensor name.
    """

    checkpoint_format: str
    findings: tuple[InspectionFinding, ...]
    layers: tuple[LayerError, ...]
    bytes_by_part: Mapping[str, int]
    quantized_modules: int
    kv_scales: Mapping[str, float] = field(default_factory=dict)
    compared_with_source: bool = False

    @property
    def passed(self) -> bool:
        """Return whether there is no finding."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the inspection and its verdict as plain JSON values; NaN and infinity become null."""
        plain: dict[str, Any] = _finite({"verdict": "PASS" if self.passed else "FAIL", **asdict(self)})
        return plain

    def summary(self, limit: int = 5) -> str:
        """Return a text for a person: one line if it passed, else at most ``limit`` findings of each rule."""
        if self.passed:
            worst = min(self.layers, key=lambda layer: layer.sqnr_db, default=None)
            exact = sum(math.isinf(layer.sqnr_db) for layer in self.layers)
            error = f"; {exact} modules hold their source's very numbers" if exact else ""
            if worst is not None and not math.isinf(worst.sqnr_db):
                error += f"; least SQNR {worst.sqnr_db:.1f} dB at {worst.module}"
            scales = f", {len(self.kv_scales)} KV scales" if self.kv_scales else ""
            return f"{self.quantized_modules} quantized modules{scales}, nothing missing{error}"
        lines: list[str] = []
        for rule in dict.fromkeys(finding.rule for finding in self.findings):
            same = [finding for finding in self.findings if finding.rule == rule]
            lines += [f"{rule}: {finding.where}: {finding.message}" for finding in same[:limit]]
            if len(same) > limit:
                lines.append(f"{rule}: … {len(same) - limit} more")
        return "\n".join(lines)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_SCALE_DTYPES = ("BF16", "F16", "F32")
_PACKED = "weight_packed"
_QUANTIZED_ONLY = ("_scale", "_zero_point", _PACKED, "weight_shape", "weight_g_idx")


def expected_tensors(
    checkpoint: Checkpoint, structure: Structure, claims: Claims
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the tensors that the claims promise for each quantized module, with scale dtypes as in the checkpoint.

    A scale that is not stored, or has none of the dtypes that libraries give it, is expected in BF16.
    """
    form = layout_of(checkpoint.config)
    expected: dict[str, tuple[StoredTensor, ...]] = {}
    for module, shape in structure.quantizable.items():
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


def check_structure(checkpoint: Checkpoint, structure: Structure, claims: Claims) -> Iterator[InspectionFinding]:
    """Yield the contradictions between the claims of the configuration and the headers of the files.

    These are tensors that are missing, have the wrong dtype or shape, or are not declared.
    """
    form = layout_of(checkpoint.config)
    expected = expected_tensors(checkpoint, structure, claims)
    yield from (InspectionFinding(*fault) for fault in structure.faults)
    for module, reason in claims.unknown.items():
        yield InspectionFinding(
            "unknown scheme", module, f"its configuration ({reason}) is no scheme that quantmint knows"
        )
    for tensors in expected.values():
        for stored in tensors:
            yield from _check_tensor(checkpoint, stored)
    promised = {stored.name for tensors in expected.values() for stored in tensors} | set(structure.scales)
    if claims.kv_cache:
        for attention in structure.attention:
            for name in form.kv_scale_names(attention):
                promised.add(name)
                yield from _check_kv_tensor(checkpoint, name)
    stacks = structure.predictor_stacks
    for module, reason in structure.kept.items():
        entry = checkpoint.tensors.get(f"{module}.weight")
        if claims.schemes.get(module) is None or module in expected or module in stacks:
            continue
        if entry is None or entry[1].dtype in SIXTEEN_BIT:
            if entry is None and reason == OUTPUT_HEAD:
                continue  # it is the embedding, which servers take in its place
            held = "a stack" if entry is None else entry[1].dtype
            message = f"it is {held}, the configuration does not keep it in 16 bit ({reason})"
            yield InspectionFinding("not quantized", f"{module}.weight", message)
        elif reason == UNQUANTIZED:
            yield InspectionFinding(
                "unservable", f"{module}.weight", f"it is {entry[1].dtype}; {reason}, and cannot load it"
            )
    yield from _check_fusion(structure, claims, load_view(checkpoint.config))
    sixteen = {*structure.quantizable, *structure.kept} - expected.keys() - claims.unknown.keys()
    for module in sorted(sixteen):
        entry = checkpoint.tensors.get(f"{module}.weight")
        if entry is not None and entry[1].dtype not in (*SIXTEEN_BIT, "F32"):
            message = f"it is {entry[1].dtype}, the configuration keeps it in 16 bit"
            yield InspectionFinding("undeclared", f"{module}.weight", message)
    for name in checkpoint.tensors:
        extra = name.endswith(_QUANTIZED_ONLY) and name not in promised
        if extra and name.rpartition(".")[0] not in claims.unknown:
            yield InspectionFinding("undeclared", name, "it is stored, but the configuration does not declare it")


def _check_fusion(structure: Structure, claims: Claims, view: LoaderView | None) -> Iterator[InspectionFinding]:
    """Yield a finding for each group of modules that vLLM loads as one and that have more than one scheme.

    ``view`` is how vLLM loads the model; without one, modules' names decide.
    """
    groups: defaultdict[str, dict[str | None, str]] = defaultdict(dict)
    for module in dict.fromkeys((*structure.quantizable, *structure.kept)):
        for group in fusion_names(module, view) if module not in claims.unknown else ():
            groups[group].setdefault(claims.schemes.get(module), module)
    for group, modules in groups.items():
        if len(modules) > 1:
            said = " and ".join(f"{module} in {scheme or '16 bit'}" for scheme, module in list(modules.items())[:2])
            yield InspectionFinding("split", group, f"vLLM loads it as one, and the configuration has {said}")


def _scale_dtype(checkpoint: Checkpoint, module: str, role: str) -> str:
    entry = checkpoint.tensors.get(f"{module}.{role}")
    return entry[1].dtype if entry is not None and entry[1].dtype in _SCALE_DTYPES else "BF16"


def _check_tensor(checkpoint: Checkpoint, stored: StoredTensor) -> Iterator[InspectionFinding]:
    entry = checkpoint.tensors.get(stored.name)
    if entry is None:
        rule = "missing scale" if stored.role.endswith("_scale") else "not quantized"
        yield InspectionFinding(rule, stored.name, f"{stored.dtype} {list(stored.shape)} is declared, but not stored")
        return
    info = entry[1]
    if info.dtype != stored.dtype:
        rule = "not quantized" if info.dtype in SIXTEEN_BIT and stored.role == "weight" else "wrong dtype"
        yield InspectionFinding(rule, stored.name, f"it is {info.dtype}, the configuration promises {stored.dtype}")
    elif info.shape != stored.shape:
        yield InspectionFinding("wrong shape", stored.name, f"it is {list(info.shape)}, expected {list(stored.shape)}")


def _check_kv_tensor(checkpoint: Checkpoint, name: str) -> Iterator[InspectionFinding]:
    entry = checkpoint.tensors.get(name)
    scheme = checkpoint.config["quantization_config"].get("kv_cache_scheme") or {}
    if entry is None:
        yield InspectionFinding("missing scale", name, "a static FP8 KV cache is declared, its scale is not stored")
    elif entry[1].dtype not in _SCALE_DTYPES:
        yield InspectionFinding(
            "wrong dtype", name, f"it is {entry[1].dtype}, a KV scale is one of {', '.join(_SCALE_DTYPES)}"
        )
    elif entry[1].parameters != 1 and (scheme.get("strategy") != "attn_head" or not entry[1].parameters):
        yield InspectionFinding("wrong shape", name, f"it is {list(entry[1].shape)}, expected a single KV scale")
