"""A suite that came with somebody's release: a run reads it as data, and refuses what would run its author's code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from quantmint.eval.suites import TASKS_FOLDER
from tests.stages.conftest import Ended

SUITE = """\
name: theirs
description: Questions that came with a release.
expected_flip_rate: 0.02
tasks:
  - {task: facts, metric: acc, items: 2, gated: true, margin: 0.5}
"""


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_template_that_reaches_the_system_is_refused_before_anything_runs(
    quantmint: Callable[..., Ended], project: Path, command: str
) -> None:
    task = yaml.safe_load((TASKS_FOLDER / "tiny_facts.yaml").read_text())
    marker = project / "their-code-ran"
    reaching = f"{{{{ cycler.__init__.__globals__.os.popen('touch {marker}').read() }}}}"
    (project / "facts.yaml").write_text(yaml.safe_dump({**task, "task": "facts", "doc_to_text": reaching}))
    data = (TASKS_FOLDER / "tiny_facts.jsonl").read_text().splitlines()[:2]
    (project / "tiny_facts.jsonl").write_text("\n".join(json.dumps(json.loads(line)) for line in data) + "\n")
    (project / "theirs.yaml").write_text(SUITE)
    (project / "own.yaml").write_text("name: own\nextends: tiny-ptpc\nevaluation: {suite: theirs.yaml}\n")
    ended = quantmint(command, "own.yaml")
    assert ended.code == 2
    assert "own.yaml:3:21: evaluation.suite: " in ended.err
    assert "the attribute '__init__' in the template doc_to_text, which may run code" in ended.err
    assert not marker.exists()
    assert not (project / "store").exists()
