"""What quantization did to each layer: error by module, scales of the KV cache."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

from eval.report.model import LayerError, Report
from eval.report.plots.heatmap import heatmap, scale
from eval.report.plots.kv_scales import kv_scales
from eval.report.views import WIDE, drawn


def errors(report: Report) -> dict[str, Any] | None:
    """SQNR by layer and module; None where no weight was compared with its source."""
    inside = [error for error in report["layers"] if error["layer"] is not None]
    outside = [error for error in report["layers"] if error["layer"] is None]
    if not report["layers"]:
        return None
    kinds = list(dict.fromkeys(error["kind"] for error in inside))
    cells: dict[tuple[int, str], float] = {}
    for error in inside:
        place = (error["layer"] or 0, error["kind"])
        cells[place] = min(error["sqnr_db"], cells.get(place, error["sqnr_db"]))
    worst = sorted(report["layers"], key=lambda error: error["sqnr_db"])[:3]
    return {
        "plot": drawn(partial(heatmap, cells, kinds), "layers") if cells else None,
        "scale": scale(cells) if cells else [],
        "kinds": kinds,
        "rows": [
            (layer, [cells.get((layer, kind)) for kind in kinds]) for layer in sorted({layer for layer, _ in cells})
        ],
        "outside": outside,
        "worst": [f"{error['sqnr_db']:.1f} dB {_where(error)}" for error in worst],
        "experts": sum(error["modules"] for error in report["layers"]) > len(report["layers"]),
    }


def cache(report: Report) -> dict[str, Any] | None:
    """Scales of the KV cache by layer; None where the cache has none."""
    if not report["kv_scales"]:
        return None
    profiles: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for entry in report["kv_scales"]:
        profiles[entry["which"]][entry["layer"]] = (entry["low"], entry["high"])
    layers = sorted({layer for profile in profiles.values() for layer in profile})
    heads = any(low != high for profile in profiles.values() for low, high in profile.values())
    return {
        "plot": drawn(partial(kv_scales, profiles), "kv-scales", wide=WIDE),
        "names": list(profiles),
        "rows": [(layer, [profiles[which].get(layer) for which in profiles]) for layer in layers],
        "heads": heads,
    }


def _where(error: LayerError) -> str:
    return error["kind"] if error["layer"] is None else f"{error['kind']} of layer {error['layer']}"
