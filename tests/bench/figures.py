"""From measured runs to medians, ratios, goals and the table that people read."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.bench.contenders import CASES

GOALS = Path(__file__).with_name("goals.yaml")
_SPREAD = ("written", "returned", "durable", "cpu", "import", "warm_up")


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, minimum and maximum of each time in seconds, and the largest memory in bytes, over the rounds."""
    found: dict[str, Any] = {
        name: {
            "median": statistics.median(run[name] for run in runs),
            "min": min(run[name] for run in runs),
            "max": max(run[name] for run in runs),
        }
        for name in _SPREAD
    }
    for name in ("peak_rss", "mapped", "peak_device"):
        sizes = [run[name] for run in runs if run[name] is not None]
        found[name] = max(sizes) if sizes else None
    for name in ("phases", "threads"):
        parts = dict.fromkeys(part for run in runs for part in run[name])
        found[name] = {part: statistics.median(run[name].get(part, 0.0) for run in runs) for part in parts}
    return found


def judge(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal that was measured: its words, the figure, whether it was reached."""
    return list(_judged(result))


def _judged(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    device = str(result["device"]).partition(":")[0]
    for goal in yaml.safe_load(GOALS.read_text(encoding="utf-8")):
        if (goal["device"], goal["shape"]) != (device, result["shape"]):
            continue
        for case in goal["cases"]:
            value = _figure(result, case, goal)
            if value is None:
                continue
            least, most = goal.get("at_least"), goal.get("at_most")
            yield {
                "case": case,
                "figure": goal["figure"],
                "than": goal.get("than"),
                "goal": least if least is not None else most,
                "value": value,
                "reached": value >= least if least is not None else value <= most,
            }


def _figure(result: Mapping[str, Any], case: str, goal: Mapping[str, Any]) -> float | None:
    rows = result["cases"].get(case, {})
    ours = rows.get("quantmint")
    if not measured(ours):
        return None
    seconds = ours["written"]["median"]
    match goal["figure"]:
        case "seconds":
            return float(seconds)
        case "peak_rss_mb":
            return float(ours["peak_rss"]) / 1e6
        case "rss_doubled":
            doubled = result["doubled"].get(case)
            return None if doubled is None else float(doubled["peak_rss"]) / float(ours["peak_rss"])
        case "times_cp":
            return seconds / rows["cp"]["written"]["median"] if measured(rows.get("cp")) else None
        case _:
            other = rows.get(goal["than"])
            return other["written"]["median"] / seconds if measured(other) else None


def measured(row: Mapping[str, Any] | None) -> bool:
    """Whether a contender ran; else its row says why it did not."""
    return row is not None and "why_not" not in row


_WORDS = {
    "times_faster": "goal {goal:g}x faster than {than}: {value:.1f}x",
    "times_cp": "goal {goal:g} x cp: {value:.2f} x",
    "seconds": "goal {goal:g} s: {value:.2f} s",
    "peak_rss_mb": "goal {goal:g} MB resident: {value:.0f} MB",
    "rss_doubled": "goal {goal:g} x the memory with twice the layers: {value:.2f} x",
}


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    machine, lines = result["machine"], []
    lines.append(
        f"{result['model_gb']:.2f} GB of bf16 in {result['shards']} files, on {result['device']}: "
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gb']} GB, torch {machine['torch']}"
        + (f", {machine['accelerator']}" if machine["accelerator"] else "")
        + f"; load before {machine['load_before']}; {result['rounds']} rounds, medians (min to max)"
    )
    for case, rows in result["cases"].items():
        calibrated = f", {result['samples']} x {result['length']} tokens" if case == "fp8_kv" else ""
        lines += ["", f"{case}: {CASES[case]}{calibrated}"]
        lines.append(
            f"  {'':<45}{'written, s':>22}{'durable, s':>12}{'x cp':>7}{'ours is':>9}{'CPU s':>8}"
            f"{'RSS MB':>8}{'import s':>10}"
        )
        lines += [_line(row, rows) for row in rows.values()]
        ours = rows.get("quantmint")
        if measured(ours):
            lines += [
                f"  ours, s: {_parts(ours['phases'])}; warm-up {ours['warm_up']['median']:.2f}",
                f"  its threads, s: {_parts(ours['threads'])}; files mapped in the end {ours['mapped'] / 1e6:.0f} MB",
            ]
        if (predicted := result["predicted"].get(case)) and measured(ours):
            pairs = (
                ("written", predicted["written"], ours["written"]["median"], "{:.2f} s"),
                ("durable", predicted["durable"], ours["durable"]["median"], "{:.2f} s"),
                ("resident", predicted["memory"] / 1e6, ours["peak_rss"] / 1e6, "{:.0f} MB"),
            )
            lines.append(
                "  predicted as by `quantmint plan`: "
                + ", ".join(f"{name} {form.format(said)} ({said / was - 1:+.0%})" for name, said, was, form in pairs)
            )
        if (same := result["same_bytes"].get(case)) is not None:
            lines.append(f"  {same['same']} of {same['of']} tensors are those of {same['than']}, bit for bit")
        if doubled := result["doubled"].get(case):
            lines.append(
                f"  twice the layers: {doubled['peak_rss'] / 1e6:.0f} MB resident, {doubled['written']:.2f} s written"
            )
        lines += [
            f"  {_WORDS[goal['figure']].format(**goal)}, {'reached' if goal['reached'] else 'missed'}"
            for goal in result["goals"]
            if goal["case"] == case
        ]
    return "\n".join(lines)


def _parts(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())


def _line(row: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    if not measured(row):
        return f"  {row['name']:<45}  {row['why_not'][:100]}"
    written, ours, copied = row["written"], rows.get("quantmint"), rows.get("cp")
    spread = f"{written['median']:.2f} ({written['min']:.2f} to {written['max']:.2f})"
    times = f"{written['median'] / copied['written']['median']:.2f}" if measured(copied) else "-"
    faster = f"{written['median'] / ours['written']['median']:.1f}x" if measured(ours) and row is not ours else "-"
    memory = f"{row['peak_rss'] / 1e6:.0f}" if row["peak_rss"] else "-"
    return (
        f"  {row['name']:<45}{spread:>22}{row['durable']['median']:>12.2f}{times:>7}{faster:>9}"
        f"{row['cpu']['median']:>8.1f}{memory:>8}{row['import']['median']:>10.1f}"
    )
