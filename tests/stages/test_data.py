"""The commits of tasks' data: named where they are known, the same from a plan to its run, remembered for later."""

from __future__ import annotations

from dataclasses import replace

from quantmint.calibration.errors import CalibrationError
from quantmint.eval.suites import SuiteTask
from quantmint.pipeline.stages import lm_eval
from quantmint.pipeline.stages.lm_eval import task_settings
from quantmint.pipeline.stages.setting import Commits, Setting

A, B = "a" * 40, "b" * 40
TASK = SuiteTask("gsm8k", "exact_match", 1319, 0.04, data=("openai/gsm8k", "org/more@v1", f"org/fixed@{B}"))


def hub(setting: Setting, *answers: str) -> Setting:
    """The setting with a Hub that gives these answers in turn, then none."""
    left = list(answers)

    def ask(repo: str, revision: str) -> str:
        if not left:
            raise CalibrationError(f"{repo}@{revision}: away")
        return left.pop(0)

    return replace(setting, commits=Commits(ask))


def test_each_is_asked_once_and_stays(setting: Setting) -> None:
    asked = hub(setting, A)
    for _ in range(2):
        assert lm_eval.data_commits(asked, TASK) == {"openai/gsm8k": A, "org/fixed": B}


def test_the_commit_is_in_the_fingerprint_and_its_name_alone_is_not(setting: Setting) -> None:
    own = SuiteTask("tiny_facts", "acc", 2000, 0.02)
    (known, ours) = task_settings(hub(setting, A, A), TASK, own)["tasks"]  # type: ignore[misc]
    assert known["data"] == {"openai/gsm8k": A, "org/more": A, "org/fixed": B}
    assert "data" not in ours
    unnamed = replace(TASK, data=("openai/gsm8k",))
    assert task_settings(hub(setting), unnamed) == task_settings(hub(setting), replace(TASK, data=()))
