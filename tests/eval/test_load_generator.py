"""`vllm bench serve`: the command of every version that is known, and results read whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import load_generator
from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.prompts import PromptFile
from quantmint.eval.workloads import Cell

CELL = Cell("c4", 64, 32, 4, 32, 4)
GOALS = (("ttft", 200.0), ("e2el", 4000.0))
LINES, TALKS = PromptFile("jsonl", Path("/p/x.jsonl")), PromptFile("sharegpt", Path("/p/x.json"))
CELLS = (
    CELL,
    replace(CELL, concurrency=None, rate=2.5, goodput=GOALS),
    replace(CELL, file=TALKS, output_len=None, ignore_eos=False),
    replace(CELL, file=TALKS),
    replace(CELL, file=LINES, ignore_eos=False),
    replace(CELL, file=replace(LINES, chat_template=False), output_len=8),
)
# Options of `vllm bench serve` that every supported version has: entry, first and last version of each line.
TABLE = [line.split("\t") for line in (Path(__file__).parents[1] / "assets" / "vllm.tsv").read_text().splitlines()]
KNOWN = {row[1] for row in TABLE if row[0] == "bench" and row[2:] == ["0.19.0", "0.33.0"]}
# The keys that vLLM 0.32 saved for this cell, values rounded.
SAVED: dict[str, Any] = {
    "backend": "vllm", "num_prompts": 32, "max_concurrency": 4, "duration": 46.23, "completed": 32, "failed": 0,
    "total_input_tokens": 2079, "total_output_tokens": 1024, "request_throughput": 0.692, "request_goodput": None,
    "output_throughput": 22.15, "total_token_throughput": 67.12, "max_output_tokens_per_s": 124.0,
    "max_concurrent_requests": 6,
    **{
        f"{statistic}_{name}_ms": base * factor
        for name, base in (("ttft", 454.7), ("tpot", 97.1), ("itl", 35.95), ("e2el", 3340.1))
        for statistic, factor in (("mean", 1.1), ("median", 1.0), ("std", 0.5), ("p50", 1.0), ("p99", 4.0))
    },
}  # fmt: skip


def save(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "c4.json"
    path.write_text(json.dumps(SAVED | changes))
    return path


def argv_of(cell: Cell, **changes: Any) -> list[str]:
    options = {"base_url": "http://h:1/", "model": "m", "served_model_name": "n", "result": Path("/f/r.json")} | changes
    return load_generator.command("vllm", cell, **options)


def flags_of(argv: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in argv[3:]:
        if word.startswith("--"):
            values = found.setdefault(word, [])
        else:
            values.append(word)
    return found


def test_reads_what_vllm_saved(tmp_path: Path) -> None:
    result = load_generator.read(save(tmp_path), CELL, gpus=2)
    assert (result.completed, result.failed, result.duration) == (32, 0, 46.23)
    assert (result.output_throughput, result.total_throughput) == (22.15, 67.12)
    assert (result.ttft_p50, result.e2el_p99) == (454.7, 4 * 3340.1)
    assert (result.gpus, result.concurrency, result.request_rate) == (2, 4, None)
    assert result.peak_output_throughput == 124.0
    assert (result.requests_per_second, result.goodput) == (0.692, None)
    assert CellResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_goodput_is_there_where_goals_are(tmp_path: Path) -> None:
    cell = replace(CELL, goodput=GOALS, rate=1.5, concurrency=None)
    result = load_generator.read(save(tmp_path, request_goodput=0.5), cell)
    assert (result.goodput, result.request_rate, result.concurrency) == (0.5, 1.5, None)
    with pytest.raises(MeasurementError, match="no 'request_goodput'"):
        load_generator.read(save(tmp_path), cell)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failed": 1, "completed": 31}, "31 of 32 requests completed, 1 failed"),
        ({"completed": 30}, "30 of 32 requests completed, 0 failed"),
        ({"total_output_tokens": 700}, "700 tokens came back, expected 768 to 1024"),
        ({"p99_itl_ms": None}, "itl_p99: Input should be a valid number, found None"),
        ({"output_throughput": float("nan")}, "output_throughput: Input should be a finite number, found nan"),
    ],
)
def test_a_partial_load_is_not_a_measurement(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        load_generator.read(save(tmp_path, **changes), CELL)
    assert words in str(caught.value)


def test_answers_may_end_by_themselves(tmp_path: Path) -> None:
    saved = save(tmp_path, total_output_tokens=700)
    assert load_generator.read(saved, replace(CELL, file=LINES, ignore_eos=False)).completed == 32
    assert load_generator.read(saved, replace(CELL, file=TALKS, output_len=None)).completed == 32
    with pytest.raises(MeasurementError, match="700 tokens came back, expected 1024"):
        load_generator.read(saved, replace(CELL, file=LINES))


def test_a_file_with_too_few_prompts_says_so(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"20 of 32 requests completed, 0 failed; /p/x\.json has no more"):
        load_generator.read(save(tmp_path, completed=20), replace(CELL, file=TALKS))


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("Error 0: Bad Request\nError 1: other\n", "1 failed: Bad Request"),
        (
            "\nError 0: Traceback (most recent call last):\n  File x\naiohttp.ServerDisconnectedError: gone\n"
            "============ Serving Benchmark Result ============\nFailed requests: 1\n",
            "1 failed: aiohttp.ServerDisconnectedError: gone",
        ),
        ("nothing of the kind\n", "1 failed"),
    ],
)
def test_lost_requests_say_why(tmp_path: Path, printed: str, words: str) -> None:
    log = tmp_path / "c4.log"
    log.write_text(f"Failed requests during benchmark run detected (capping to 10):\n{printed}")
    with pytest.raises(MeasurementError) as caught:
        load_generator.read(save(tmp_path, failed=1, completed=31), CELL, log=log)
    assert str(caught.value).endswith(words)


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no benchmark result"):
        load_generator.read(tmp_path / "none.json", CELL)


def test_command_carries_every_field_of_the_cell() -> None:
    argv = argv_of(CELL, seed=7)
    wanted = {
        "--random-input-len": ["57"], "--random-output-len": ["28"], "--max-concurrency": ["4"],
        "--random-range-ratio": ["0.11"], "--num-prompts": ["32"], "--seed": ["7"], "--base-url": ["http://h:1"],
        "--result-dir": ["/f"], "--result-filename": ["r.json"], "--ignore-eos": [], "--dataset-name": ["random"],
    }  # fmt: skip
    assert wanted.items() <= flags_of(argv).items()
    assert argv[:3] == ["vllm", "bench", "serve"]
    assert not {"--request-rate", "--goodput", "--dataset-path"} & flags_of(argv).keys()


def test_command_of_a_rate_and_of_goals() -> None:
    flags = flags_of(argv_of(CELLS[1]))
    assert (flags["--request-rate"], flags["--goodput"]) == (["2.5"], ["ttft:200.0", "e2el:4000.0"])
    assert "--max-concurrency" not in flags
    all_at_once = flags_of(argv_of(replace(CELL, concurrency=None)))
    assert not {"--max-concurrency", "--request-rate"} & all_at_once.keys()  # vLLM's default rate is inf


def test_command_of_a_file() -> None:
    talks, fixed, lines, plain = (flags_of(argv_of(cell)) for cell in CELLS[2:])
    assert (talks["--dataset-name"], talks["--dataset-path"]) == (["sharegpt"], ["/p/x.json"])
    assert "--sharegpt-output-len" not in talks
    assert fixed["--sharegpt-output-len"] == ["32"]
    assert "--ignore-eos" in fixed
    assert (lines["--dataset-name"], lines["--custom-output-len"]) == (["custom"], ["32"])
    assert not {"--ignore-eos", "--skip-chat-template"} & lines.keys()
    assert "--skip-chat-template" in plain
    assert flags_of(argv_of(replace(CELL, file=LINES, output_len=None)))["--custom-output-len"] == ["-1"]
    assert all("--no-oversample" in flags for flags in (talks, fixed, lines, plain))


def test_every_version_knows_the_options() -> None:
    for cell in CELLS:
        assert flags_of(argv_of(cell)).keys() <= KNOWN
