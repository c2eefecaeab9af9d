"""What a report shows of the files: bytes by part, error by module, scales of the KV cache."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from eval.report.model import KvScale, LayerError, Size
from pipeline.quantize.formats.checkpoint import Checkpoint, TensorInfo

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
_SCALES = ("_scale", "_zero_point", "_shape")
_ORDER = ("q_a", "q_b", "q", "kv_a_proj_with_mqa", "kv_b", "qkv", "k", "v", "o", "gate_up", "gate", "up", "down")
_PARTS = ("linear weights", "scales", "embeddings and head", "norms and biases", "other weights in 16 bit")


def sizes(source: Checkpoint, checkpoint: Checkpoint) -> Size:
    """Bytes of both sides by part. What is in both with equal dtype and shape has not been quantized."""
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


def layer_errors(layers: Iterable[Mapping[str, Any]]) -> list[LayerError]:
    """Error of every quantized linear that was compared with its source, experts of a layer as one, by their worst.

    A linear is called by the end of its path that no other kind of linear has: `q_proj`, `experts.down_proj`.
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
    """Where a linear stands among others: in the order in which a layer computes, its experts after all else."""
    name = path.rpartition(".")[2].removesuffix("_proj")
    return "expert" in path, _ORDER.index(name) if name in _ORDER else len(_ORDER), path


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """The shortest end of each dotted path that is no other path's end."""
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
    """Scales of the KV cache by layer: ``single`` is one a layer, by tensor; those by head are read from the files."""
    values = {name: (scale, scale) for name, scale in single.items() if scale is not None}
    many = [
        name
        for name, (_, info) in checkpoint.tensors.items()
        if name.endswith((".k_scale", ".v_scale")) and name not in values and info.nbytes
    ]
    if many:
        from pipeline.quantize.inspection.numbers import Reader

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
