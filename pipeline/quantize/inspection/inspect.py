"""The whole inspection of a folder, ours or anybody's; and what a report shows of its files."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quantmint.eval.report.model import KvScale, Size
from quantmint.eval.report.model import ShownLayerError as ReportedError
from quantmint.pipeline.base.machine import cores
from quantmint.pipeline.quantize.engines.algorithms import Alters, recorded_alterations
from quantmint.pipeline.quantize.engines.stream.switches import many_small_workers
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, Reader, TensorInfo
from quantmint.pipeline.quantize.formats.layout import Claims, StoredTensor, layout_of
from quantmint.pipeline.quantize.inspection.companions import check_companions
from quantmint.pipeline.quantize.inspection.findings import (
    Inspection,
    InspectionFinding,
    LayerError,
    check_structure,
    expected_tensors,
)
from quantmint.pipeline.quantize.inspection.numbers import check_copy, check_kv_scale, check_module, check_outputs
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.source import SourceReader, carried
from quantmint.pipeline.quantize.model.structure import Structure


@dataclass(frozen=True, slots=True)
class Expectations:
    """Facts known of a checkpoint before it is inspected.

    ``scales`` are static scales, of inputs and of the KV cache, by tensor name; a tuple where there is one for each
    head. ``nbytes`` is the predicted size of all tensors. ``sqnr_db`` is the signal-to-noise ratio of each module of a
    checkpoint that was measured while its files were written, and whose files were read back then. It is not measured
    again: of each tensor the first rows and all scales are read, to prove that they lie where the headers say.
    ``output_db`` is the ratio of the outputs of each module whose weight was moved for its output's sake.
    """

    scales: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)
    nbytes: int | None = None
    sqnr_db: Mapping[str, float] | None = None
    output_db: Mapping[str, float] = field(default_factory=dict)


def inspect_checkpoint(
    checkpoint: Checkpoint,
    structure: Structure,
    *,
    source: Checkpoint | None = None,
    source_structure: Structure | None = None,
    expected: Expectations | None = None,
    allow_unit_kv_scales: bool = False,
    device: str = "cpu",
    advance: Callable[[int], None] = lambda _: None,
) -> Inspection:
    """Check that a quantized checkpoint is what its configuration says, some rows at a time, and return the findings.

    Smoothed or rotated weights, as a recorded algorithm leaves them, cannot be compared with their source: they are
    only proven to be numbers. Raises `UserError` where config.json declares no quantization in a known format.

    Args:
        checkpoint: the quantized checkpoint.
        structure: the structure of the checkpoint's model.
        source: the model that the checkpoint was made from; with it the error of every layer is measured, and
            untouched tensors are compared, both with the decoded source; so are configuration, template and tokenizer.
        source_structure: the structure of the source; without it ``structure`` must be the source's.
        expected: facts known of the checkpoint beforehand.
        allow_unit_kv_scales: accept KV scales of exactly 1.0, for a checkpoint that asks for them.
        device: the device that compares numbers.
        advance: called with the bytes of tensors that were checked.
    """
    expected = expected or Expectations()
    form = layout_of(checkpoint.config)
    claims = form.claims(checkpoint.config["quantization_config"], [*structure.quantizable, *structure.kept])
    findings = _structure_findings(checkpoint, structure, claims, source)
    stored = expected_tensors(checkpoint, structure, claims)
    cached = [name for attention in structure.attention for name in form.kv_scale_names(attention)]
    cached = [name for name in cached if claims.kv_cache and name in checkpoint.tensors]
    look = _Inspector(
        checkpoint=checkpoint,
        read=Reader(checkpoint, device),
        original=None if source is None else SourceReader(source, device),
        weights=_source_weights(source, source_structure or structure, stored),
        expected=stored,
        claims=claims,
        scales={name: value if isinstance(value, tuple) else (value,) for name, value in expected.scales.items()},
        alters=recorded_alterations(checkpoint),
        facts=expected,
        unsound=frozenset(finding.where for finding in findings),
    )
    with many_small_workers(), ThreadPoolExecutor(cores(), "inspect") as pool:
        layers, faults = look.modules(pool, advance)
        kv_scales, unfit = look.kv_scales(cached, allow_one=allow_unit_kv_scales)
        differences = look.copies(pool, structure, cached, advance) if source is not None else []
    findings += [*faults, *unfit, *differences, *_size_findings(checkpoint, expected.nbytes)]
    return Inspection(
        checkpoint_format=form.name,
        findings=tuple(findings),
        layers=tuple(layers),
        bytes_by_part=_bytes_by_part(checkpoint, look.quantized(cached)),
        quantized_modules=len(stored),
        kv_scales=kv_scales,
        compared_with_source=source is not None,
    )


def _structure_findings(
    checkpoint: Checkpoint, structure: Structure, claims: Claims, source: Checkpoint | None
) -> list[InspectionFinding]:
    """Check the tensors' names, shapes and dtypes, that the configuration quantizes a module, and the files beside it.

    The files beside the weights are compared with the source's, where there is one.
    """
    findings = [] if source is None else list(check_companions(checkpoint.folder, source.folder))
    findings += check_structure(checkpoint, structure, claims)
    if not any(claims.schemes.values()) and not claims.unknown:
        findings.append(
            InspectionFinding("not quantized", str(checkpoint.folder), "the configuration quantizes no module at all")
        )
    return findings


def _source_weights(
    source: Checkpoint | None, structure: Structure, modules: Mapping[str, tuple[StoredTensor, ...]]
) -> dict[str, WeightSource]:
    """Return where the source holds each carried tensor, and each weight of the quantized ``modules``, by tensor name.

    ``structure`` is the source's. Without a source nothing is carried.
    """
    weights = {} if source is None else carried(source, structure, modules)
    return weights | {
        f"{module}.weight": structure.weights[module] for module in modules if module in structure.weights
    }


def _size_findings(checkpoint: Checkpoint, predicted: int | None) -> list[InspectionFinding]:
    """Return a finding where the bytes of all tensors differ from ``predicted``; none where that is None."""
    if predicted is None or checkpoint.nbytes == predicted:
        return []
    message = f"{checkpoint.nbytes:,} bytes of tensors, predicted {predicted:,}"
    return [InspectionFinding("size", str(checkpoint.folder), message)]


@dataclass(frozen=True, slots=True)
class _Inspector:
    """The checks of a checkpoint's parts: quantized modules, KV scales, and tensors carried over from the source.

    Any thread may call `module` and `copy`.
    """

    checkpoint: Checkpoint
    read: Reader
    original: SourceReader | None
    weights: Mapping[str, WeightSource]
    expected: Mapping[str, tuple[StoredTensor, ...]]
    claims: Claims
    scales: Mapping[str, tuple[float, ...]]
    alters: Alters
    facts: Expectations
    unsound: Collection[str]

    def modules(
        self, pool: Executor, advance: Callable[[int], None]
    ) -> tuple[list[LayerError], list[InspectionFinding]]:
        """Check every quantized module in the threads of ``pool``; return the modules' errors and findings."""
        layers: list[LayerError] = []
        findings: list[InspectionFinding] = []
        for name, results in zip(self.expected, pool.map(self.module, self.expected), strict=True):
            findings += [result for result in results if isinstance(result, InspectionFinding)]
            layers += [result for result in results if isinstance(result, LayerError)]
            advance(sum(stored.nbytes for stored in self.expected[name]))
        return layers, findings

    def kv_scales(self, names: Sequence[str], *, allow_one: bool) -> tuple[dict[str, float], list[InspectionFinding]]:
        """Return the KV scales that are one number, and the findings about any of the named scales.

        ``allow_one`` accepts scales of exactly 1.0.
        """
        scales: dict[str, float] = {}
        findings: list[InspectionFinding] = []
        for name in (name for name in names if name not in self.unsound):
            values: list[float] = self.read(name).float().reshape(-1).tolist()
            scales |= {name: values[0]} if len(values) == 1 else {}
            measured = self.scales.get(name, (None,) * len(values))
            if len(values) != len(measured):
                message = f"{len(values)} scales, calibration measured {len(measured)}"
                findings.append(InspectionFinding("wrong shape", name, message))
                continue
            for value, expected_value in zip(values, measured, strict=True):
                findings += check_kv_scale(name, value, expected_value, allow_one=allow_one)
        return scales, findings

    def quantized(self, cached: Sequence[str]) -> set[str]:
        """Return the names of the tensors of quantized modules, and of the KV scales ``cached``."""
        return {stored.name for tensors in self.expected.values() for stored in tensors} | set(cached)

    def copies(
        self, pool: Executor, structure: Structure, cached: Sequence[str], advance: Callable[[int], None]
    ) -> list[InspectionFinding]:
        """Check the tensors carried over from the source, and that no other tensor is there; return the findings."""
        untouched, tensors = _untouched(structure, self.alters), self.checkpoint.tensors
        names = [name for name in self.weights if not _quantized(name, self.expected)]
        copies = pool.map(lambda name: self.copy(name, exact=untouched(name, self.shape(name))), names)
        findings: list[InspectionFinding] = []
        for name, differences in zip(names, copies, strict=True):
            findings += differences
            advance(tensors[name][1].nbytes if name in tensors else 0)
        for name in sorted(set(tensors) - self.weights.keys() - self.quantized(cached)):
            # A head that shared the embedding's tensor has its own once the two differ.
            own_head = name.endswith(".weight") and name.removesuffix(".weight") in structure.kept
            if not own_head or untouched(name, tensors[name][1].shape):
                findings.append(InspectionFinding("undeclared", name, "the source has no such tensor"))
        return findings

    def module(self, module: str) -> list[InspectionFinding | LayerError]:
        tensors, scheme = self.expected[module], self.claims.schemes[module] or ""
        if any(stored.name in self.unsound for stored in tensors):
            return []
        proven = None if self.facts.sqnr_db is None else self.facts.sqnr_db.get(module)
        weight, original = self.weights.get(f"{module}.weight"), None
        if self.original is not None and weight is not None and weight in self.original:
            original = partial(self.original.rows, weight)
        results = list(check_module(self.read, module, scheme, tensors, original, self.alters, proven))
        if module in self.facts.output_db:
            results += check_outputs(module, scheme, self.facts.output_db[module])
        for name in self.scales.keys() & {stored.name for stored in tensors}:
            value, measured = float(self.read(name).float().reshape(())), self.scales[name][0]
            if value != measured:
                results.append(
                    InspectionFinding("wrong scale", name, f"{value:g}; the calibrated range gives {measured:g}")
                )
        return results

    def copy(self, name: str, *, exact: bool) -> list[InspectionFinding]:
        if self.original is None or name not in self.read:
            return [InspectionFinding("missing", name, "the source has it, the checkpoint does not")]
        proven = self.facts.sqnr_db is not None
        return list(check_copy(name, self.read, self.original, self.weights[name], exact=exact, proven=proven))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in which a tensor of the source is carried over; () without a source."""
        return () if self.original is None else self.original.shape(self.weights[name])


def _quantized(name: str, expected: Collection[str]) -> bool:
    module, _, role = name.rpartition(".")
    return role == "weight" and module in expected


def _untouched(structure: Structure, alters: Alters) -> Callable[[str, tuple[int, ...]], bool]:
    """Return a function of a carried tensor's name and shape that says whether it must equal the source bit for bit.

    ``alters`` is what an algorithm changed in the model.
    """
    multiplied = {*structure.linear, *structure.kept}

    def untouched(name: str, shape: tuple[int, ...]) -> bool:
        if alters == "channels":  # norms, biases, and the linear modules between them
            return len(shape) > 1 and name.rpartition(".")[0] not in multiplied
        return alters != "everything"

    return untouched


def _bytes_by_part(checkpoint: Checkpoint, quantized: set[str]) -> dict[str, int]:
    parts = {"quantized weights": 0, "scales": 0, "16 bit": 0}
    for name, (_, info) in checkpoint.tensors.items():
        scales = name.endswith(("_scale", "_zero_point", "_shape"))
        part = "16 bit" if name not in quantized else "scales" if scales else "quantized weights"
        parts[part] += info.nbytes
    return parts


_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
_SCALES = ("_scale", "_zero_point", "_shape")
_ORDER = ("q_a", "q_b", "q", "kv_a_proj_with_mqa", "kv_b", "qkv", "k", "v", "o", "gate_up", "gate", "up", "down")
_PARTS = ("linear weights", "scales", "embeddings and head", "norms and biases", "other weights in 16 bit")


def sizes(source: Checkpoint, checkpoint: Checkpoint) -> Size:
    """Return the bytes of source and checkpoint by part; tensors of equal name, dtype and shape are unquantized."""
    before = {name: info for name, (_, info) in source.tensors.items()}
    after = {name: info for name, (_, info) in checkpoint.tensors.items()}
    kept = {
        name
        for name, info in after.items()
        if name in before and (info.dtype, info.shape) == (before[name].dtype, before[name].shape)
    }
    sums: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for total, tensors in zip(sums, (before, after), strict=True):
        for name, info in tensors.items():
            total[_part(info, name in kept)] += info.nbytes
    return {
        "baseline_bytes": source.nbytes,
        "candidate_bytes": checkpoint.nbytes,
        "parts": [
            {"name": part, "baseline_bytes": sums[0][part], "candidate_bytes": sums[1][part]}
            for part in _PARTS
            if sums[0][part] or sums[1][part]
        ],
    }


def _part(info: TensorInfo, kept: bool) -> str:
    if not kept:
        return "scales" if info.name.endswith(_SCALES) else "linear weights"
    if len(info.shape) <= 1:
        return "norms and biases"
    heads = ("embed", "lm_head", "wte")
    return "embeddings and head" if any(word in info.name for word in heads) else "other weights in 16 bit"


def layer_errors(layers: Iterable[Mapping[str, Any]]) -> list[ReportedError]:
    """Return the errors of quantized linears by layer and kind; of several, such as experts, the worst counts.

    ``layers`` are entries of an inspection's JSON; those without an error are left out. A kind is named by the end of
    its path that no other kind has: `q_proj`, `experts.down_proj`.
    """
    found: dict[tuple[int | None, str], list[float]] = defaultdict(list)
    for layer in layers:
        if layer["sqnr_db"] is not None:
            number = _NUMBER.search(layer["module"])
            found[(int(number[1]) if number else None, _NUMBER.sub("", layer["module"]))].append(layer["sqnr_db"])
    names = short_names({path for _, path in found})
    paths = sorted(names, key=_place)
    return [
        {"layer": number, "kind": names[path], "sqnr_db": min(values), "modules": len(values)}
        for (number, path), values in sorted(found.items(), key=lambda item: paths.index(item[0][1]))
    ]


def _place(path: str) -> tuple[bool, int, str]:
    """Return a sort key that puts linear modules in the order in which a layer computes them, experts last."""
    name = path.rpartition(".")[2].removesuffix("_proj")
    return "expert" in path, _ORDER.index(name) if name in _ORDER else len(_ORDER), path


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Map each dotted path to its shortest end that is no other path's end."""
    split = {path: path.split(".") for path in paths}
    names: dict[str, str] = {}
    for path, words in split.items():
        others = [other for other in split.values() if other != words]
        length = next(
            (size for size in range(1, len(words)) if not any(other[-size:] == words[-size:] for other in others)),
            len(words),
        )
        names[path] = ".".join(words[-length:])
    return names


def kv_scales(checkpoint: Checkpoint, single: Mapping[str, float]) -> list[KvScale]:
    """Return the KV scales by layer, with the least and the largest of each.

    ``single`` are the scales that are one number, by tensor name; scales by head are read from the checkpoint's files.
    """
    values = {name: (scale, scale) for name, scale in single.items() if scale is not None}
    many = [
        name
        for name, (_, info) in checkpoint.tensors.items()
        if name.endswith((".k_scale", ".v_scale")) and name not in values and info.nbytes
    ]
    read = Reader(checkpoint)
    for name in many:
        heads = read(name).float().reshape(-1)
        values[name] = (float(heads.min()), float(heads.max()))
    found: list[KvScale] = []
    for name, (low, high) in values.items():
        number = _NUMBER.search(name)
        if number is not None:
            which = "K" if name.endswith((".k_scale", "k_proj.output_scale")) else "V"
            found.append({"layer": int(number[1]), "which": which, "low": low, "high": high})
    return sorted(found, key=lambda scale: (scale["which"], scale["layer"]))
