"""The whole inspection of a folder, ours or anybody's.

>>> inspection = inspect_checkpoint(open_checkpoint(Path("model-fp8")), structure)
>>> inspection.passed, inspection.summary()
(True, '224 quantized modules, 64 KV scales, nothing missing')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.quantize.engines.algorithms import Alters, recorded_alterations
from pipeline.quantize.formats.checkpoint import Checkpoint, TensorInfo
from pipeline.quantize.formats.known import layout_of
from pipeline.quantize.inspection.findings import Finding, Inspection, LayerError, check_structure, expected_tensors
from pipeline.quantize.inspection.numbers import Reader, check_copy, check_kv_scale, check_module, check_static_scale
from pipeline.quantize.model.structure import Structure


def inspect_checkpoint(
    checkpoint: Checkpoint,
    structure: Structure,
    *,
    source: Checkpoint | None = None,
    expected_scales: Mapping[str, float | tuple[float, ...]] | None = None,
    expected_bytes: int | None = None,
    allow_unit_kv_scales: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Inspection:
    """Prove or disprove a quantized checkpoint.

    What an algorithm that the checkpoint records did to the weights is taken into account: smoothed or rotated weights
    cannot be compared with their source, and are only proven to be numbers in the right places.

    Args:
        checkpoint: the folder to look at.
        structure: of the same model, from its configuration.
        source: the 16-bit model; with it the error of every layer is measured and untouched tensors are compared.
        expected_scales: static scales, of inputs and of the KV cache, by tensor name, where the ranges are known; a
            tuple where there is one a head.
        expected_bytes: the size of all tensors that was predicted, bytes.
        allow_unit_kv_scales: accept KV scales of exactly 1.0, for a checkpoint that asks for them.
        advance: told the bytes of each tensor that was checked.
    """
    form = layout_of(checkpoint.config)
    modules = [*structure.linear, *structure.kept]
    claims = form.claims(checkpoint.config["quantization_config"], modules)
    findings = list(check_structure(checkpoint, structure, claims))
    if not any(claims.schemes.values()) and not claims.unknown:
        findings.append(
            Finding("not quantized", str(checkpoint.folder), "the configuration quantizes no module at all")
        )
    unsound = {finding.where for finding in findings}
    read, read_source = Reader(checkpoint), None if source is None else Reader(source)
    expected = expected_tensors(checkpoint, structure, claims)
    wanted = {name: found if isinstance(found, tuple) else (found,) for name, found in (expected_scales or {}).items()}
    alters = recorded_alterations(checkpoint)
    layers: list[LayerError] = []
    for module, tensors in expected.items():
        if unsound.isdisjoint(stored.name for stored in tensors):
            name = f"{module}.weight"
            original = read_source(name) if read_source is not None and source and name in source.tensors else None
            for result in check_module(read, module, claims.schemes[module] or "", tensors, original, alters):
                (findings if isinstance(result, Finding) else layers).append(result)  # type: ignore[arg-type]
            for name in wanted.keys() & {stored.name for stored in tensors}:
                findings += check_static_scale(name, read(name), wanted[name][0])
        advance(sum(stored.nbytes for stored in tensors))
    scales: dict[str, float] = {}
    cached = [name for attention in structure.attention for name in form.kv_scale_names(attention)]
    cached = [name for name in cached if claims.kv_cache and name in checkpoint.tensors]
    for name in (name for name in cached if name not in unsound):
        values: list[float] = read(name).float().reshape(-1).tolist()
        scales |= {name: values[0]} if len(values) == 1 else {}
        measured = wanted.get(name, (None,) * len(values))
        if len(values) != len(measured):
            findings.append(Finding("wrong shape", name, f"{len(values)} scales, calibration measured {len(measured)}"))
            continue
        for value, expected_value in zip(values, measured, strict=True):
            findings += check_kv_scale(name, value, expected_value, allow_one=allow_unit_kv_scales)
    quantized = {stored.name for tensors in expected.values() for stored in tensors} | set(cached)
    if source is not None and read_source is not None:
        untouched = _untouched(structure, alters)
        copies = _Copies(checkpoint, source, read, read_source, untouched, advance)
        findings += copies.compare(quantized, set(expected), frozenset(structure.kept))
    if expected_bytes is not None and checkpoint.nbytes != expected_bytes:
        findings.append(
            Finding(
                "size", str(checkpoint.folder), f"{checkpoint.nbytes:,} bytes of tensors, predicted {expected_bytes:,}"
            )
        )
    return Inspection(
        checkpoint_format=form.name,
        findings=tuple(findings),
        layers=tuple(layers),
        bytes_by_part=_bytes_by_part(checkpoint, quantized),
        quantized_modules=len(expected),
        kv_scales=scales,
        compared_with_source=source is not None,
    )


def _untouched(structure: Structure, alters: Alters) -> Callable[[TensorInfo], bool]:
    """Which tensors that stay in 16 bit are the source's, bit for bit."""
    multiplied = {*structure.linear, *structure.kept}

    def exact(info: TensorInfo) -> bool:
        if alters == "channels":  # norms, biases, and the linear modules between them
            return len(info.shape) > 1 and info.name.rpartition(".")[0] not in multiplied
        return alters != "everything"

    return exact


@dataclass(frozen=True, slots=True)
class _Copies:
    """What a checkpoint takes over from its source."""

    checkpoint: Checkpoint
    source: Checkpoint
    read: Reader
    read_source: Reader
    untouched: Callable[[TensorInfo], bool]
    advance: Callable[[int], None]

    def compare(self, quantized: set[str], modules: set[str], kept: frozenset[str]) -> Iterator[Finding]:
        for name, (_, info) in self.source.tensors.items():
            module, _, role = name.rpartition(".")
            if role == "weight" and module in modules:
                continue
            if name not in self.checkpoint.tensors:
                yield Finding("missing", name, "the source has it, the checkpoint does not")
            else:
                yield from check_copy(name, self.read(name), self.read_source(name), exact=self.untouched(info))
                self.advance(info.nbytes)
        for name in sorted(set(self.checkpoint.tensors) - set(self.source.tensors) - quantized):
            # A head that shared the embedding's tensor has its own once the two differ.
            own_head = name.endswith(".weight") and name.removesuffix(".weight") in kept
            if not own_head or self.untouched(self.checkpoint.tensors[name][1]):
                yield Finding("undeclared", name, "the source has no such tensor")


def _bytes_by_part(checkpoint: Checkpoint, quantized: set[str]) -> dict[str, int]:
    parts = {"quantized weights": 0, "scales": 0, "16 bit": 0}
    for name, (_, info) in checkpoint.tensors.items():
        scales = name.endswith(("_scale", "_zero_point", "_shape"))
        part = "16 bit" if name not in quantized else "scales" if scales else "quantized weights"
        parts[part] += info.nbytes
    return parts
