"""Arguments that go to vLLM as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.errors import UserError
from pipeline.serving.knobs.passed import checked_arguments

CONFIG = Path(__file__).parents[2] / "assets" / "configs" / "DeepSeek-R1-0528"


def test_each_flag_has_its_words() -> None:
    words = ["--reasoning-parser", "deepseek_r1", "--middleware", "a", "b", "--enable-auto-tool-choice", "--x=1"]
    assert [(reason.knob, reason.value) for reason in checked_arguments(words)] == [
        ("--reasoning-parser", "deepseek_r1"),
        ("--middleware", "a b"),
        ("--enable-auto-tool-choice", "on"),
        ("--x", "1"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deepseek_r1"], "found 'deepseek_r1' first, expected a flag"),
        (["--max-num-seqs", "4"], "--max-num-seqs is a knob of the plan"),
        (["--max_num_seqs=4"], "--max-num-seqs is a knob of the plan"),
        (["--port", "1"], "--port is a knob of the plan"),
        (["--no-enable-expert-parallel"], "is a knob of the plan"),
        (["--api-key", "secret"], "--api-key would stand in the process list"),
    ],
)
def test_what_the_plan_would_not_know_of_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        checked_arguments(words)
    assert message in caught.value.message
    assert "secret" not in str(caught.value)


def test_they_stand_behind_the_plans_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--target mi300x:8 --vllm 0.33.0 --json -- --reasoning-parser deepseek_r1"
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(CONFIG), *options.split()])
    assert ended.value.code == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["argv"][-2:] == ["--reasoning-parser", "deepseek_r1"]
    assert plan["processes"][0]["argv"][-2:] == ["--reasoning-parser", "deepseek_r1"]
    assert plan["reasons"][-1]["source"] == "given"
