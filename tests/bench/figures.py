"""From measured runs to medians, ratios, goals and the table that people read."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.bench.contenders import CALIBRATED, CASES, FIRST, OURS

GOALS = Path(__file__).with_name("goals.yaml")
PARTS = ("start", "calibrate", "work", "flush", "proof")
"""Of a command's seconds, as it tells them; what is left is its end."""
Rows = dict[str, dict[str, dict[str, Any]]]


def rows(result: Mapping[str, Any]) -> Rows:
    """By case (that of the baselines is empty) and contender: medians of the rounds, or ``why_not``.

    ``wall`` (also ``wall_min``, ``wall_max``), ``cpu``, ``later`` (from the exit until all is on the disk) and
    ``parts`` are seconds, ``rss`` is the largest peak in bytes, ``made_gb`` the checkpoint's size.
    """
    runs: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in result["runs"]:
        runs.setdefault(run["case"], {}).setdefault(run["contender"], []).append(run)
    return {case: {name: _row(those) for name, those in found.items()} for case, found in runs.items()}


def _row(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"title": runs[0]["title"]}
    if why := next((run["why_not"] for run in runs if "why_not" in run), None):
        return row | {"why_not": why}

    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    walls = [run["wall"] for run in runs]
    told = [part for part in PARTS if any(part in run["seconds"] for run in runs)]
    parts = {part: median([run["seconds"].get(part, 0.0) for run in runs]) for part in told}
    if parts:
        parts["end"] = median([run["wall"] - sum(run["seconds"].values()) for run in runs])
    return row | {
        "wall": median(walls),
        "wall_min": min(walls),
        "wall_max": max(walls),
        "cpu": median([run["cpu"] for run in runs]),
        "rss": max(run["rss"] for run in runs),
        "later": median([run["later"] for run in runs]) if "later" in runs[0] else None,
        "made_gb": runs[0].get("made_gb"),
        "parts": parts,
    }


def measured(row: Mapping[str, Any] | None) -> bool:
    """Whether a contender ran; else its row says why it did not."""
    return row is not None and "why_not" not in row


def judge(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal that was measured: its case, whose it is, its words, the figure, whether it was reached."""
    return list(_judged(result))


def _judged(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    device, found = str(result["device"]).partition(":")[0], rows(result)
    for goal in yaml.safe_load(GOALS.read_text(encoding="utf-8")):
        if (goal["device"], goal["shape"]) != (device, result["shape"]):
            continue
        for case in goal["cases"]:
            for contender in goal.get("of", ("quantmint", FIRST)):
                value = _figure(found, case, contender, goal)
                if value is None:
                    continue
                least, most = goal.get("at_least"), goal.get("at_most")
                yield {
                    "case": case,
                    "contender": contender,
                    "figure": goal["figure"],
                    "than": goal.get("than"),
                    "goal": least if least is not None else most,
                    "value": value,
                    "reached": value >= least if least is not None else value <= most,
                }


def _figure(found: Rows, case: str, contender: str, goal: Mapping[str, Any]) -> float | None:
    ours = found.get(case, {}).get(contender)
    if ours is None or not measured(ours):
        return None
    if goal["figure"] == "seconds":
        return float(ours["wall"])
    if goal["figure"] == "rss_mb":
        return float(ours["rss"]) / 1e6
    other = (found.get(case, {}) | found.get("", {})).get(goal["than"])
    if other is None or not measured(other):
        return None
    match goal["figure"]:
        case "times_faster":
            return float(other["wall"] / ours["wall"])
        case "cpu_times":
            return float(ours["cpu"] / other["cpu"])
        case "times_after_start":
            return float((ours["wall"] - ours["parts"].get("start", 0.0)) / other["wall"])
        case _:
            return float(ours["wall"] / other["wall"])


_WORDS = {
    "times_faster": "goal {goal:g} x as fast as {than}: {value:.1f} x",
    "times_after_start": "goal {goal:g} x {than} after the start: {value:.2f} x",
    "times": "goal {goal:g} x {than}: {value:.2f} x",
    "cpu_times": "goal {goal:g} x the processor seconds of {than}: {value:.2f} x",
    "seconds": "goal {goal:g} s: {value:.1f} s",
    "rss_mb": "goal {goal:g} MB resident: {value:.0f} MB",
}


def line(part: str, found: Mapping[str, Any]) -> str:
    """A measurement, the moment that it is made, in a line."""
    if part == "disk":
        how = "" if found["direct"] else ", through the page cache"
        return f"disk alone{how}: {found['gb']:.2f} GB in {found['seconds']:.2f} s"
    if part == "beside":
        return _crowd(found)
    name = f"{found['case']:<9} {found['title']:<40} "
    if "why_not" in found:
        return f"{name} {found['why_not']}"
    told = ", ".join(f"{what} {seconds:.2f}" for what, seconds in found["seconds"].items())
    later = f", later to the disk {found['later']:.2f}" if "later" in found else ""
    gpu = f", {found['gpu_gb']:.1f} GB of the GPU" if "gpu_gb" in found else ""
    return f"{name} {found['wall']:6.2f} s, CPU {found['cpu']:.1f} s, {found['rss'] / 1e6:,.0f} MB{gpu}: {told}{later}"


def _crowd(found: Mapping[str, Any]) -> str:
    name = f"{found['case']}: {found['count']} of ours beside each other"
    if "why_not" in found:
        return f"{name}: {found['why_not']}"
    share = found["wall"] / found["count"] / found["alone"]
    return (
        f"{name}: {found['wall']:.2f} s, {share:.2f} x the time in sequence (one alone {found['alone']:.2f} s); "
        f"each {min(found['each']):.1f} to {max(found['each']):.1f} s, at most {found['rss'] / 1e6:,.0f} MB"
    )


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    machine, lines, found, goals = result["machine"], [], rows(result), judge(result)
    lines.append(
        f"{result['model_gb']:.2f} GB of bf16 in {result['shards']} files, on {result['device']}: "
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gb']} GB, torch {machine['torch']}"
        + (f", {machine['accelerator']}" if machine["accelerator"] else "")
        + f"; load before {machine['load_before']}"
    )
    lines.append(
        f"seconds from start to exit, medians of {len(result['disk'])} rounds; later: until all is on the disk"
    )
    lines.append(_rate(result))
    for case, those in found.items():
        calibrated = f", {result['samples']} x {result['length']} tokens" if case in CALIBRATED else ""
        lines += ["", f"### {case}: {CASES[case]}{calibrated}" if case else "### to compare with"]
        lines += ["", *_grid([_cells(row, those) for row in those.values() if measured(row)])]
        told = [f"{row['title']}: {row['why_not'][:100]}" for row in those.values() if not measured(row)]
        told += [
            f"{_WORDS[goal['figure']].format(**goal)}, {'reached' if goal['reached'] else 'missed'}"
            + ("" if goal["contender"] == "quantmint" else f", of {OURS[goal['contender']]}")
            for goal in goals
            if goal["case"] == case
        ]
        lines += ["", *told] if told else []
    lines += [f"\n{_crowd(crowd)}" for crowd in result["beside"]]
    return "\n".join(lines)


def disk_rate(result: Mapping[str, Any]) -> float:
    """GB/s that the disk took alone: the median of the rounds."""
    return float(statistics.median(found["gb"] / found["seconds"] for found in result["disk"]))


def _rate(result: Mapping[str, Any]) -> str:
    rate = disk_rate(result)
    how = "past the page cache, 4 threads, fsync" if result["disk"][0]["direct"] else "page cache, 4 threads, fsync"
    made = [(case, row["quantmint"]["made_gb"]) for case, row in rows(result).items() if measured(row.get("quantmint"))]
    needs = ", ".join(f"{case} {size / rate:.1f} s" for case, size in made)
    return f"the disk alone takes {rate:.2f} GB/s ({how})" + (f": {needs}" if needs else "")


def _cells(row: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table by the columns' names; what is not known of it is empty."""
    ours = beside.get("quantmint")
    told = row["parts"] | ({} if row["later"] is None else {"later": row["later"]})
    compared = ours is not None and measured(ours) and row is not ours
    return {
        "": row["title"],
        "seconds": f"{row['wall']:.2f}",
        "range": f"{row['wall_min']:.2f} to {row['wall_max']:.2f}" if row["wall_min"] < row["wall_max"] else "",
        "ours is": f"{row['wall'] / ours['wall']:.1f} x" if ours is not None and compared else "",
        **{part: f"{told[part]:.2f}" if part in told else "" for part in (*PARTS, "end", "later")},
        "CPU s": f"{row['cpu']:.1f}",
        "RSS MB": f"{row['rss'] / 1e6:,.0f}",
    }


def _grid(cells: Sequence[Mapping[str, str]]) -> list[str]:
    """A table of Markdown that is read on a terminal as well, without the columns that nobody fills."""
    columns = [name for name in (cells[0] if cells else ()) if not name or any(row[name] for row in cells)]
    widths = {name: max(len(name), *(len(row[name]) for row in cells)) for name in columns}
    lines = [{name: name for name in columns}, *cells]
    drawn = [
        [line[name].rjust(widths[name]) if name else line[name].ljust(widths[name]) for name in columns]
        for line in lines
    ]
    rule = ["-" * widths[name] if not name else "-" * (widths[name] - 1) + ":" for name in columns]
    return [f"| {' | '.join(row)} |" for row in (drawn[0], rule, *drawn[1:])] if cells else []
