"""Programs of others that measure: their output, their secrets, their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.base.processes import Child, run_logged

ROOT = Path(__file__).parents[3]
# Starts a child in a session of its own, says both process ids, and never ends.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
OWNER = """
import sys
from pathlib import Path
from quantmint.pipeline.base import processes
processes._GRACE_S = 0.5
processes.run_logged([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path(sys.argv[3]), what="it", env={})
"""


def python(*code: str) -> list[str]:
    return [sys.executable, "-c", *code]


def test_its_output_is_kept_and_its_end_is_watched(tmp_path: Path) -> None:
    seen: list[str] = []
    code = "import time; print('half', flush=True); time.sleep(1.3); print('whole')"
    run_logged(python(code), tmp_path / "log", what="it", env={}, watch=seen.append)
    assert (tmp_path / "log").read_text() == "half\nwhole\n"
    assert any(end.endswith("half\n") for end in seen)  # the last look may fall between its last word and its end


def test_a_failure_quotes_its_last_words_and_names_the_log(tmp_path: Path) -> None:
    code = "import sys; print('before'); print('no such task', file=sys.stderr); sys.exit(3)"
    with pytest.raises(StageError, match=r"^lm-eval on x ended with exit code 3: .*no such task") as caught:
        run_logged(python(code), tmp_path / "log", what="lm-eval on x", env={})
    assert caught.value.hint is not None
    assert str(tmp_path / "log") in caught.value.hint


@pytest.mark.slow
def test_a_program_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    """Its status was lost where it ended before the supervisor looked: some in a hundred."""
    for _ in range(40):
        run_logged(["true"], tmp_path / "log", what="it", env={})
    with pytest.raises(StageError, match="exit code 1"):
        run_logged(["false"], tmp_path / "log", what="it", env={})


def test_it_gets_no_token_but_those_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "OPENAI_API_KEY",
        "MY_PASSWORD",
        "QUANTMINT_SIGNING_PASSPHRASE",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "QUANTMINT_WEBHOOK",
    ):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    code = "import os; e = os.environ; print(sorted(k for k in e if e[k] == 'hidden'), e['TOKENIZERS_PARALLELISM'])"
    run_logged(python(code), tmp_path / "none", what="it", env={})
    assert (tmp_path / "none").read_text() == "[] true\n"
    run_logged(python(code), tmp_path / "one", what="it", env={}, secrets=("HF_TOKEN",))
    assert (tmp_path / "one").read_text() == "['HF_TOKEN'] true\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_it_outlives_us(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    owner = subprocess.Popen(python(OWNER, STUBBORN, str(pids), str(tmp_path / "log")), cwd=ROOT)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert owner.poll() is None
        time.sleep(0.05)
    owner.send_signal(number)
    owner.wait(timeout=20)
    deadline = time.monotonic() + 30
    left = [int(pid) for pid in pids.read_text().split()]
    while (left := [pid for pid in left if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_ctrl_c_waits_for_no_program_that_heeds_nothing(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupted() -> None:
        with Child(python(STUBBORN, str(pids)), {}, tmp_path / "log", grace=3600):
            while not pids.exists() or len(pids.read_text().split()) < 2:
                time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [pid for pid in pids.read_text().split() if running(int(pid))] == []


def test_shared_memory_of_what_is_killed_is_freed(tmp_path: Path) -> None:
    code = (
        "import multiprocessing as m, time; s = m.get_context('spawn').Semaphore(); print(s._semlock.name, flush=True)"
    )
    with Child(python(f"{code}; time.sleep(600)"), {}, tmp_path / "log", grace=0) as child:
        while not child.log():
            time.sleep(0.05)
        semaphore = Path(f"/dev/shm/sem.{child.log().strip().removeprefix('/')}")
        assert semaphore.exists()
    assert not semaphore.exists()


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (ProcessLookupError, FileNotFoundError):
        return False
