"""What the plots decide before they draw: places in time, colours of errors, ticks and words that fit."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from quantmint.eval.report import numbers
from quantmint.eval.report.layers import BIT_DB, heatmap, scale, span
from quantmint.eval.report.model import ShownStage
from quantmint.eval.report.numbers import signed, unit_of
from quantmint.eval.report.plots import HEATS, PanelGrid, number, shorten, whole_ticks
from quantmint.eval.report.run import _packed, command


def stage(name: str, began: float, seconds: float) -> ShownStage:
    started = datetime.fromtimestamp(began, UTC).isoformat()
    return {"name": name, "started": started, "seconds": seconds, "cached": False, "fingerprint": ""}


def test_idle_time_is_cut_out_and_marked_where_it_was_long() -> None:
    week = 7 * 86_400
    places, cuts = _packed([stage("b", week, 5), stage("a", 0, 10), stage("c", week + 6, 4)])
    assert [(item["name"], start) for item, start in places] == [("a", 0), ("b", 10), ("c", 15)]
    assert cuts == [10]


def test_stages_at_the_same_time_overlap() -> None:
    places, cuts = _packed([stage("one", 0, 100), stage("other", 40, 30), stage("last", 100, 5)])
    assert [start for _, start in places] == [0, 40, 100]
    assert cuts == []


def test_mere_noise_stays_pale_and_the_worst_does_not() -> None:
    noise = {(layer, "q"): 31.4 + 0.2 * math.sin(layer) for layer in range(32)}
    assert span(noise)[1] - span(noise)[0] == pytest.approx(BIT_DB)
    assert set(drawn(noise)) <= {0, 1}
    broken = {**noise, (7, "q"): 9.0}
    assert span(broken) == (9.0, max(noise.values()))
    assert drawn(broken).count(HEATS - 1) == 1
    assert [step for _, step in scale(broken)] == list(range(HEATS))
    assert scale(broken)[-1][0] == "9.0"


def drawn(cells: dict[tuple[int, str], float]) -> list[int]:
    """The colours of the cells."""
    svg = heatmap(cells, ["q"], width=760, name="h")
    return [step for step in range(HEATS) for _ in range(svg.count(f"fill: var(--heat-{step})"))]


@pytest.mark.parametrize(("layers", "most"), [(1, 4), (4, 4), (32, 17), (126, 12), (61, 3)])
def test_ticks_of_layers_are_whole_and_few(layers: int, most: int) -> None:
    ticks = whole_ticks(range(layers), most)
    assert 1 <= len(ticks) <= most + 1
    assert all(isinstance(tick, int) and 0 <= tick < layers for tick in ticks)
    assert len(set(ticks)) == len(ticks)


def test_words_that_do_not_fit_keep_both_ends() -> None:
    assert shorten("in1024-out512-c128", 400, 13) == "in1024-out512-c128"
    cut = shorten("mmlu_high_school_government_and_politics", 150, 13)
    assert cut.startswith("mmlu_")
    assert cut.endswith("tics")
    assert len(cut) <= 150 / (0.6 * 13)


def test_panels_of_a_grid_do_not_overlap() -> None:
    grid = PanelGrid(760, 3, 5, 132)
    assert (grid.rows, grid.height) == (2, 2 * (30 + 132 + 42))

    class Axis:
        shown = True
        box: tuple[float, ...] = ()

        def set_position(self, box: list[float]) -> None:
            self.box = tuple(box)

        def set_visible(self, shown: bool) -> None:
            self.shown = shown

    axes = grid.place([Axis() for _ in range(6)])
    assert len(axes) == 5
    assert all(low >= 0 and low + height <= 1 and left >= 0 and left + width <= 1
               for left, low, width, height in (axis.box for axis in axes))  # fmt: skip
    assert len({axis.box for axis in axes}) == 5


def test_a_perplexity_gets_worse_upwards_and_a_score_downwards() -> None:
    score, perplexity = unit_of("graded"), unit_of("perplexity")
    assert score.scale(-0.01) == pytest.approx(-1)
    assert score.margin(0.01) == -1
    assert perplexity.scale(-math.log(1.02)) == pytest.approx(2)
    assert perplexity.margin(0.02) == 2
    assert perplexity.span(-0.02, 0.01) == (
        pytest.approx(100 * math.expm1(-0.01)),
        pytest.approx(100 * math.expm1(0.02)),
    )
    assert perplexity.interval(-0.02, 0.01) == f"{signed(-1.0)} \N{HORIZONTAL ELLIPSIS} +2.02"
    assert (score.words(-0.015), perplexity.margin_words(0.02)) == (
        f"{signed(-1.5)}\N{NO-BREAK SPACE}pt",
        "+2.00\N{NO-BREAK SPACE}%",
    )
    assert math.isfinite(score.scale(-math.inf))
    assert math.isfinite(perplexity.scale(-math.inf))


def test_figures_as_people_write_them() -> None:
    nbsp = "\N{NO-BREAK SPACE}"
    minus = "\N{MINUS SIGN}"
    assert [numbers.size(n) for n in (0, 999, 1000, 4_220_000, 16_060_522_496, 2.5e15)] == [
        "0 B", "999 B", "1.00 kB", "4.22 MB", "16.1 GB", "2,500 TB",
    ]  # fmt: skip
    assert [numbers.duration(s) for s in (0.04, 59.94, 60, 3599, 7260)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "59 min 59 s", "2 h 01 min",
    ]  # fmt: skip
    assert [numbers.figure(v) for v in (None, 0, 0.001234, -12.345, 1234.5)] == [
        "\N{EN DASH}", "0", "0.00123", f"{minus}12.3", "1,234",
    ]  # fmt: skip
    assert numbers.percent(0.99812) == f"99.8{nbsp}%"
    assert numbers.signed(-0.155) == f"{minus}0.15"
    assert [numbers.p_value(p) for p in (None, 0.5, 0.0049, 1e-9)] == ["\N{EN DASH}", "0.500", "0.0049", "< 0.0001"]
    assert numbers.signs("-1.5 of in64-c4, a-b, -2") == f"{minus}1.5 of in64-c4, a-b, {minus}2"
    assert [number(v) for v in (0, -2.5, 10_000)] == ["0", f"{minus}2.5", "10,000"]


def test_a_command_that_a_shell_takes() -> None:
    said = command({"B": "1 2", "A": "x"}, ["vllm", "serve", "my model", "--flag", "--json", '{"a": 1}', "-x"])
    assert said == ("A=x \\\n  B='1 2' \\\n  vllm serve 'my model' \\\n  --flag \\\n  --json '{\"a\": 1}' -x")
    assert command({}, ["python", "-m", "m"]) == "python -m m"
