"""The sweep as a table in Markdown, which a terminal shows as well."""

from __future__ import annotations

from pipeline.tuning.page import SHORT, figure
from pipeline.tuning.report import COMPARED, PointReport, Report, percent


def markdown(report: Report) -> str:
    """One row a plan: how each figure differs from the base plan's, `~` where that is noise; then what was not done."""
    noise = report["noise"]
    rows = [["plan", *(SHORT[name] for name in COMPARED), "launches"]]
    rows += [[_name(report, point), *_figures(report, point, noise), str(point["runs"])] for point in report["points"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(_padded(cell, width, column) for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in rows
    ]
    rule = (
        "|"
        + "|".join("-" * (width + 2 - bool(column)) + ":" * bool(column) for column, width in enumerate(widths))
        + "|"
    )
    text = [lines[0], rule, *lines[1:]]
    if noise is not None:
        text += [
            "",
            f"~ noise: launches of one plan differ by up to {percent(noise['output_throughput'])[1:]} in tokens/s",
        ]
    text += [""] + [
        f"{point['label']}: {point['status']}: {point['why']}" for point in report["points"] if point["why"]
    ]
    text += [f"{label}: refused: {why}" for label, why in report["refused"].items()]
    if report["not_tried"]:
        text.append(f"not tried: {'; '.join(report['not_tried'])}")
    return "\n".join(text).rstrip() + "\n"


def _name(report: Report, point: PointReport) -> str:
    gated = " (changes numbers: gate again)" if any(change["gated"] for change in point["changes"]) else ""
    return f"{point['label']}{gated}" + (" **best**" if point["number"] == report["best"] else "")


def _figures(report: Report, point: PointReport, noise: dict[str, float] | None) -> list[str]:
    if point["status"] != "ok" or not point["ratios"]:
        return [point["status"], *["-"] * (len(COMPARED) - 1)]
    if point["number"] == 0:
        cell = next(iter(point["cells"].values()))
        unit = {name: "" if name == "output_throughput" else " ms" for name in COMPARED}
        return (
            [figure(cell[name]) + unit[name] for name in COMPARED]
            if len(point["cells"]) == 1
            else ["base"] * len(COMPARED)
        )
    return [
        ("~" if noise and 1 / noise[name] <= point["ratios"][name] <= noise[name] else "")
        + percent(point["ratios"][name])
        for name in COMPARED
    ]


def _padded(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)
