"""The page without a browser: what it says of every kind of run, and that it holds no script."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import Markup

from quantmint.eval.gate import Policy
from quantmint.eval.kl import Divergences, KlPolicy, TextDivergence
from quantmint.eval.measurements import StructureCheck
from quantmint.eval.report import accuracy, flips, layers, page, run, throughput
from quantmint.eval.report.model import Flip, Report
from quantmint.eval.verdict import Verdict
from tests.eval.report import made
from tests.pages import Tags

SECTIONS = ["verdict", "headlines", "accuracy", "flips", "canary", "throughput", "layers", "kv", "size", "run"]


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots have tests of their own: only the whole run draws here."""
    for module in (accuracy, flips, layers, run, throughput):
        if "text" not in request.fixturenames:
            monkeypatch.setattr(module, "both_widths", lambda draw, name, **_: Markup(""))


@pytest.fixture(scope="module")
def report() -> Report:
    return made.good()


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return page.render(report)


def sections(text: str) -> list[str]:
    return re.findall(r'<section[^>]* id="([a-z]+)"', text)


def test_every_section_of_a_whole_run(text: str) -> None:
    assert sections(text) == SECTIONS


def test_page_holds_no_script_and_points_nowhere(text: str) -> None:
    parser = Tags(text)
    assert "svg" in parser.tags
    assert not {"script", "b/bold", "iframe", "link/stylesheet"} & parser.tags
    assert all(reference.startswith(("#", "data:")) for reference in parser.references)
    assert text.count("&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;") >= 3  # a hostile answer in each task


@pytest.mark.slow
def test_json_beside_the_page_is_what_was_rendered(report: Report, text: str, tmp_path: Path) -> None:
    page.write(tmp_path, report)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json", "report.md", "junit.xml"}
    again: Report = json.loads((tmp_path / "report.json").read_text())
    assert page.render(again) == text == (tmp_path / "report.html").read_text()


def test_reasons_are_in_words_worst_first() -> None:
    broken = replace(
        made.measurements(),
        structure=StructureCheck(Verdict.FAIL, ("2 tensors hold NaN",)),
        faults=("The bench broke",),
    )
    text = page.render(made.report(broken, made.policy(margins={"mmlu": 0.004})))
    assert '<p class="stamp" role="status">INVALID</p>' in text
    order = [
        text.index(words) for words in ("The bench broke.", "2 tensors hold NaN.", "both sides of", "checks passed")
    ]
    assert order == sorted(order)


def test_a_run_that_the_canary_stopped() -> None:
    text = page.render(made.stopped())
    assert sections(text) == [name for name in SECTIONS if name not in ("accuracy", "flips", "throughput")]
    assert '<p class="stamp" role="status">FAIL</p>' in text
    assert "The canary stopped this checkpoint in its first minute" in text
    assert "Without a finite answer: haskell." in text
    assert "Sehr geehrte Frau Weber" in text


def test_an_invalid_measurement_says_why_before_any_figure() -> None:
    text = page.render(made.invalid())
    assert sections(text) == SECTIONS
    assert text.index("Chat template differs") < text.index('class="tiles"')
    assert text.index("not the 90.00%") < text.index('class="tiles"')


def test_the_reference_runtime_is_named_and_shows_no_throughput() -> None:
    text = page.render(made.by_reference())
    assert sections(text) == [name for name in SECTIONS if name not in ("throughput", "kv")]
    assert "<b>transformers 5.17.0, dequantized weights, simulated MXFP4 activations</b>" in text
    assert "KV cache tokens" not in text
    assert "Throughput was not measured: nothing is promised of it." in text


def test_the_runtime_is_named_as_its_makers_do() -> None:
    known = made.measurements()
    sides = {side: replace(getattr(known, side), runtime="vllm 0.32.0", version="vllm 0.32.0")
             for side in ("baseline", "candidate")}  # fmt: skip
    assert "<b>vLLM 0.32.0</b>" in page.render(made.report(replace(known, **sides), made.policy()))


def test_p_is_that_of_the_promise(report: Report) -> None:
    slower = page.render(made.report(made.measurements(launches=made.launches(0.9)), made.policy(min_ratio=0.5)))
    rows = slower[slower.index("<th>Load</th><th>Verdict</th>") :]
    assert rows[: rows.index("</table>")].count("0.014") == 3


def test_hardware_that_the_promise_is_not_made_for() -> None:
    text = page.render(made.elsewhere())
    assert "The recipe promises its throughput on mi300x. What was measured on NVIDIA H100 80GB HBM3" in text


def test_nothing_but_a_structure() -> None:
    bare = made.measurements(samples={}, control={}, launches=(), canary=None, claims={})
    report = made.report(bare, Policy(margins={}), layers=[], kv_scales=[], kv_tokens={}, prompts={}, stages=[])
    assert sections(page.render(report)) == ["verdict", "size", "run"]


@pytest.mark.parametrize(("layers", "experts"), [(1, 0), (126, 0), (61, 256)])
def test_any_number_of_layers(layers: int, experts: int) -> None:
    known = made.measurements(samples={}, control={}, launches=())
    errors = [*made.layers(layers, experts=experts), {"layer": None, "kind": "lm_head", "sqnr_db": 30.5, "modules": 1}]
    text = page.render(made.report(known, made.policy(), layers=errors, kv_scales=made.kv_scales(layers)))
    table = text[text.index("Every figure, dB") :]
    rows = re.findall(r'<th scope="row" class="n">(\d+)</th>', table[: table.index("</table>")])
    assert rows == [str(number) for number in range(layers)]
    assert ("Experts of a layer are shown by their worst" in text) == bool(experts)
    assert "<dt>lm_head</dt><dd>30.50</dd>" in text


def test_a_hundred_flips_a_direction_and_the_rest_counted(report: Report) -> None:
    one: Flip = report["flips"][0]["flips"][0]
    many = [{**one, "doc_id": 10_000 + n, "direction": "lost" if n % 2 else "gained"} for n in range(262)]
    text = page.render(Report(**{**report, "flips": [{"task": "gsm8k", "flips": many}]}))
    assert text.count('class="flip fail"') == text.count('class="flip pass"') == 100
    assert text.count("31 more in report.json.") == 2


def test_long_answers_fold_and_very_long_ones_lose_their_middle(report: Report) -> None:
    one: Flip = {
        **report["flips"][0]["flips"][0],
        "prompt": "p" * 900 + "end?",
        "candidate": "x" * 50_000 + "last words",
    }
    text = page.render(Report(**{**report, "flips": [{"task": "gsm8k", "flips": [one]}]}))
    assert "all 50,010 characters" in text
    assert "44,010 characters are left out here; report.json has them" in text
    assert "last words" in text
    assert "x" * 6001 not in text


def test_a_page_of_long_answers_still_opens(report: Report) -> None:
    one: Flip = {**report["flips"][0]["flips"][0], "baseline": "b" * 80_000, "candidate": "c" * 80_000}
    many = [{**one, "doc_id": n, "direction": "lost" if n % 2 else "gained"} for n in range(200)]
    text = page.render(Report(**{**report, "flips": [{"task": "gsm8k", "flips": many}]}))
    assert text.count("74,000 characters are left out here") == 2 * 2 * 100
    assert len(text) < 4_000_000


def test_a_fixed_rate_is_no_measure_of_speed(report: Report) -> None:
    known = made.measurements()
    launches = tuple(
        replace(launch, cells={name: replace(cell, request_rate=4.0) for name, cell in launch.cells.items()})
        for launch in known.launches
    )
    text = page.render(made.report(replace(known, launches=launches), made.policy(min_ratio=None)))
    assert text.count("fixed rate: no measure of speed") == 3
    assert "output tokens/s against the load" not in text


def test_figures_of_several_gpus_are_those_of_one(report: Report) -> None:
    known = made.measurements()
    launches = tuple(
        replace(launch, cells={name: replace(cell, gpus=8) for name, cell in launch.cells.items()})
        for launch in known.launches
    )
    text = page.render(made.report(replace(known, launches=launches), made.policy()))
    assert "output tokens/s per GPU" in text
    assert "one server has 8 GPUs" in text


@pytest.mark.parametrize(("total", "verdict"), [(0.02, "PASS"), (0.2, "FAIL")])
def test_a_promised_divergence_has_a_section_and_a_tile(total: float, verdict: str) -> None:
    texts = tuple(TextDivergence(f"text {n}", 10, 10 * total * (1 + n / 100)) for n in range(20))
    known = made.measurements(kl=Divergences(True, texts))
    report = made.report(known, made.policy(kl=KlPolicy(0.05)))
    text = page.render(report)
    assert sections(text) == [*SECTIONS[:5], "kl", *SECTIONS[5:]]
    assert report["gate"]["kl"]["exact"]
    kl = text.partition('id="kl"')[2].partition("</section>")[0]
    assert verdict in kl
    assert "at most 0.05" in kl
    assert "KL divergence, nats" in text.partition('id="kl"')[0]
