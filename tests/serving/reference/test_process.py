"""The program: started as a run starts it, asked on its socket, gone with its owner."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import harness
from quantmint.eval.harness import read_asked
from quantmint.eval.suites import TASKS_FOLDER, SuiteTask
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.base.processes import Conversation, conversation
from quantmint.pipeline.serving.reference.launch import reference_command, reference_environment, reference_plan
from tests.processes import processes_naming
from tests.serving.served.cases import MODEL

pytestmark = pytest.mark.slow

OWNER = """
import sys
from pathlib import Path
from quantmint.pipeline.serving.reference.launch import reference_command, reference_environment, reference_plan
from quantmint.pipeline.base.processes import conversation
plan = reference_plan(Path(sys.argv[1]), served_model_name="m", max_model_len=64, kv_cache_dtype="auto")
command = reference_command(plan, "cpu")
with conversation(command, Path(sys.argv[2]), what="the runtime", env=reference_environment(plan)) as talk:
    talk.ask({"facts": {}})
    print("ready", flush=True)
    sys.stdin.read()
"""


def started(folder: Path, log: Path, kv_cache_dtype: str = "auto") -> Any:
    plan = reference_plan(folder, served_model_name="m", max_model_len=64, kv_cache_dtype=kv_cache_dtype)
    env = reference_environment(plan)
    return conversation(reference_command(plan, "cpu"), log, what="the reference runtime", env=env)


@pytest.fixture
def warm(warm_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports has been imported; the last test starts it as users do."""
    monkeypatch.setattr(sys, "executable", str(warm_python))


@pytest.fixture
def talk(quantize: Any, warm: None, tmp_path: Path) -> Iterator[Conversation]:
    with started(quantize("llama", "compressed-tensors").folder, tmp_path / "log", "fp8") as talk:
        yield talk


def test_it_says_what_it_is(talk: Conversation, tmp_path: Path) -> None:
    facts = talk.ask({"facts": {}})
    assert facts["version"].startswith("transformers ")
    assert facts["runtime"] == (
        f"{facts['version']} in float32, dequantized weights, simulated FP8 activations, FP8 KV cache"
    )
    assert facts["kv_cache_dtype"] == "fp8"
    assert facts["device"]["hardware"] == "cpu"
    assert facts["runtime"] in (tmp_path / "log").read_text()


def test_a_batch_is_kept_as_that_of_a_server(warm: None, tmp_path: Path) -> None:
    task = SuiteTask("tiny_facts", "acc", 12, 0.03)
    ours = tmp_path / "tasks"
    harness.materialise_tasks(TASKS_FOLDER, [task.task], ours)
    endpoint = harness.Endpoint("", "m", MODEL, 512, 7)
    with started(MODEL, tmp_path / "log") as talk:
        talk.ask(harness.opening(endpoint, ours, only_ours=True))
        assert len(talk.ask(harness.loading(task, {}))["documents"]["tiny_facts"]) > 100
        news: list[Any] = []
        told = talk.ask(harness.asking(task, {task.task: [0, 1, 5]}, tmp_path / "batch.gz"), news.append)
    asked = read_asked(tmp_path / "batch.gz")
    assert (told["items"], told["full"]) == (3, 0)
    assert [sample.doc_id for sample in asked.samples] == [0, 1, 5]
    assert len(asked.answers) == 3
    assert sum(line.get("done", 0) for line in news) == sum(line.get("expect", 0) for line in news) > 0
    assert {"seed", "lm_eval", "tokenizer", "bos"} <= asked.settings.keys()


def test_one_that_cannot_load_says_why(models: Any, warm: None, tmp_path: Path) -> None:
    with (
        pytest.raises(StageError, match=r"the reference runtime ended with exit code 2: .*no scales for its cache"),
        started(models("llama"), tmp_path / "log", "fp8"),
    ):
        pass


def test_it_ends_with_its_owner_however_that_ends(models: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a-folder-of-its-own"
    folder.symlink_to(models("llama"))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    assert any("quantmint.pipeline.serving.reference" in line for line in processes_naming(str(folder)))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    end = time.monotonic() + 30
    while (left := processes_naming(str(folder))) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == ()
