"""The page of a sweep in a real browser, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from quantmint.eval.measurements import CellResult
from quantmint.eval.workloads import Cell, Workload
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.serving.tuning import report as page
from quantmint.pipeline.serving.tuning.contest import contest_of
from quantmint.pipeline.serving.tuning.report import TuningReport, report, serve_section, serve_yaml
from quantmint.pipeline.serving.tuning.space import BASE, Axis, Point, SweepTrial
from quantmint.pipeline.serving.tuning.subject import TuningSubject
from quantmint.pipeline.serving.tuning.sweep import Design, KnobSweep, Objective
from quantmint.pipeline.serving.tuning.trials import Budget, TrialResult
from tests.pages import Tags, contrast, visit
from tests.serving.tuning.sweeping import FakeVllm, planner_for

QUICK = "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
CELLS = (Cell("in1024-out1024-c64", 1024, 1024, 64, 512, 64), Cell("in1024-out1024-c256", 1024, 1024, 256, 512, 64))
AXES = (
    Axis("--max-num-batched-tokens", ("8192", "32768")),
    Axis("--compilation-config", ('{"cudagraph_mode": "FULL"}',)),
    Axis("--max-num-seqs", ("<script>alert(1)</script>",)),
    Axis(QUICK, ("INT4",)),
)


def outcome(speed: float, wait: float) -> TrialResult:
    cells = {
        cell.name: CellResult(cell.name, 1, 0, 1.0, speed * scale, speed, wait * scale, wait * 2 * scale, wait / 10,
                              wait / 9, wait / 10, wait / 5, wait, wait)
        for cell, scale in zip(CELLS, (1.0, 2.5), strict=True)
    }  # fmt: skip
    return TrialResult(
        "ok", 61.0, "s", cells, started_seconds=31.0, kv_tokens=120_000, attention_backend="ROCM_AITER_FA"
    )


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TuningReport]:
    """A sweep whose outcomes are given, as a report."""

    def report_of(kind: str = "rocm", best: float = 1190, full: float = 1040, **more: Any) -> TuningReport:
        points: dict[SweepTrial, TrialResult] = {
            SweepTrial(BASE): outcome(1000, 100),
            SweepTrial((("--max-num-batched-tokens", "8192"),)): outcome(930, 80),
            SweepTrial((("--compilation-config", '{"cudagraph_mode": "FULL"}'),)): outcome(full, 101),
            SweepTrial((("--max-num-seqs", "<script>alert(1)</script>"),)): TrialResult(
                "failed", 9.0, "s", why="it <b>died</b>"
            ),
            SweepTrial(((QUICK, "INT4"),)): outcome(best, 97),
            SweepTrial(BASE, 1): outcome(1012, 99),
        }
        subject = TuningSubject(
            "llama", tmp_path, "a" * 64, "mi300x:8", kind, Workload("throughput", "", "throughput", CELLS),
            FakeVllm(tmp_path),  # type: ignore[arg-type]
            MappingProxyType({"cpu": "EPYC", "cores": "96", "accelerators": "8 x AMD Instinct MI300X"}),
            planner_for(tmp_path, {"--max-num-batched-tokens": "16384", "HIP_FORCE_DEV_KERNARG": "1"}, 8),
        )  # fmt: skip
        sweep = KnobSweep(subject, Design(AXES), Objective(**more), results=points)
        sweep.not_tried = [(("--max-num-batched-tokens", "32768"),)]
        finalists = [point for point in sweep.finalists() if sweep.score(BASE) is not None]
        if finalists:
            sweep.contest = contest_of(finalists, None)
            for trial in sweep.contest.trials():
                (screened,) = [points[one] for one in points if one == SweepTrial(trial.point)] or [
                    outcome(best + 1, 97)
                ]
                # Turns differ by what the base plan's two launches of the screening differ.
                (cell, *_) = screened.cells.values()
                sweep.results[trial] = outcome(cell.output_throughput + 3 * trial.run, cell.ttft_p50)
        return report(sweep, Budget(7200.0), created="2026-01-02T03:04:05+00:00", existing={}, tunableop=None)

    return report_of


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 375)])
def test_page_opens_silently_in_chromium(
    browser: Any, make: Callable[..., TuningReport], tmp_path: Path, theme: str, width: int
) -> None:
    visit(browser, page.write(tmp_path, make()).as_uri(), theme, width)
    advice = browser.find_element("css selector", ".advice")
    assert advice.text == f"{QUICK} INT4"
    assert advice.location["y"] + advice.size["height"] < 900
    shown = [svg for svg in browser.find_elements("css selector", "svg.plot") if svg.is_displayed()]
    assert len(shown) == 3 * len(CELLS)
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    labels = [text for svg in shown for text in svg.find_elements("css selector", "text")]
    assert labels
    assert all(contrast(text.value_of_css_property("fill"), paper) >= 4.5 for text in labels)
    coloured = browser.find_elements("css selector", ".tone, .say, .mark, .gated, .warn, .subject")
    assert all(contrast(element.value_of_css_property("color"), paper) >= 4.5 for element in coloured)
    heights = "return [...document.querySelectorAll('svg.plot text')].map(t => t.getBoundingClientRect().height)"
    assert min(height for height in browser.execute_script(heights) if height) >= 10


def test_page_holds_no_script_points_nowhere_and_is_the_same_again(make: Callable[..., TuningReport]) -> None:
    found = make()
    text = page.render(found)
    parser = Tags(text)
    assert "svg" in parser.tags
    assert "script" not in parser.tags
    assert all(reference.startswith(("#", "data:")) for reference in parser.references)
    assert page.render(found) == text


def test_everything_that_was_not_measured_is_said(make: Callable[..., TuningReport]) -> None:
    found = make()
    text = page.render(found)
    assert all(said in text for said in ("32768", "died", "run the gate"))
    assert found["gate_again"] == [f"{QUICK} INT4"]
    assert "8 x AMD Instinct MI300X" in page.render(found)
    assert "0.32.0+fake" in page.render(found)


def test_a_page_without_a_recommendation(make: Callable[..., TuningReport]) -> None:
    found = make(max_ttft=1.0)
    assert found["serve_yaml"] is None
    assert "No recommendation" in page.render(found)
    kept = make(best=1001, full=1008)
    assert "Keep the base plan" in page.render(kept)
    assert "For the recipe" not in page.render(kept)
    assert kept["serve"] == {"knobs": {}}


def test_finalists_and_what_they_could_not_tell_apart_are_on_the_page(make: Callable[..., TuningReport]) -> None:
    found = make(full=1190)
    assert [row["better"] for row in found["contest"]]
    text = page.render(found)
    assert "Could not be told apart" in text
    assert "cudagraph_mode FULL" in " ".join(found["undecided"])
    assert "by turns, p = " in text


@pytest.mark.parametrize(
    "point",
    [
        BASE,
        (("--max-num-seqs", "64"), ("--enforce-eager", False), ("--compilation-config", '{"cudagraph_mode": "FULL"}')),
        (("OMP_NUM_THREADS", "2"), ("--gpu-memory-utilization", "0.90"), ("--numa-bind", True)),
    ],
)
def test_the_block_is_a_section_of_a_recipe_that_asks_for_what_was_measured(tmp_path: Path, point: Point) -> None:
    existing = {"profile": "latency", "knobs": {"--max-num-seqs": 7, "--dtype": "bfloat16"}}
    block = serve_yaml(serve_section(point, existing, None))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: tiny-ptpc-fp8kv\nname: mine\n{block}")
    loaded = load_recipe(recipe).recipe
    wanted = {"--max-num-seqs": "7", "--dtype": "bfloat16"} | dict(point)
    assert dict(loaded.serve.overrides) == wanted
    assert loaded.serve.profile == "latency"


def test_the_block_names_the_tuned_kernels_where_they_won(tmp_path: Path) -> None:
    (tmp_path / "tunableop").mkdir()
    file = tmp_path / "tunableop" / "tunableop_results%d.csv"
    block = serve_yaml(serve_section((("PYTORCH_TUNABLEOP_ENABLED", "1"),), {}, str(file)))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: tiny-ptpc-fp8kv\nname: mine\n{block}")
    loaded = load_recipe(recipe)
    assert loaded.recipe.serve.knobs == {}
    assert loaded.tunableop == file
