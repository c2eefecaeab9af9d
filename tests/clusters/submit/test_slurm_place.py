"""A real Slurm: a real run of a tiny recipe, its exit code, its second turn, its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.clusters.submit import job as jobs
from quantmint.pipeline.clusters.submit.job import JobRequest, follow
from quantmint.pipeline.clusters.submit.slurm import Slurm, SlurmOptions, _state
from tests.clusters.submit import slurm
from tests.clusters.submit.cases import script, task
from tests.clusters.submit.test_command import ended

needs_slurm = pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as path:
        yield path


@pytest.fixture
def folder(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", str(config))
    monkeypatch.delenv("QUANTMINT_STORE", raising=False)
    monkeypatch.setattr(jobs, "_POLL_S", 0.1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def place(folder: Path, run: str, **options: Any) -> Slurm:
    """Slurm, with ``run`` as the body of what stands for `quantmint` there."""
    program = folder / "env/bin/quantmint"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/bash\n{run}\n", encoding="utf-8")
    program.chmod(0o755)
    return Slurm(SlurmOptions(**options), folder=folder, logs=folder / "logs")


def submitted(there: Slurm, of: JobRequest) -> str:
    with patch("sys.executable", str(Path.cwd() / "env/bin/python")):
        return there.submit(of).identifier


def followed(there: Slurm, job: str) -> tuple[int | None, str]:
    """The exit code and the log."""
    log: list[str] = []
    code = follow(there, job, log.append, lambda _: None).exit_code
    return code, "".join(log)


@pytest.mark.slow
@needs_slurm
def test_a_recipe_runs_there(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ended("tiny-ptpc", "--slurm", "--follow", "--json", "--", "--until", "source") == 0
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert (told["state"], told["exit_code"]) == ("COMPLETED", 0)
    log = Path(told["log"]).read_text(encoding="utf-8")
    assert log in err
    assert '"stage": "source"' in log
    assert [path.name for path in (folder / "store/source").iterdir()]
    assert not list((folder / "store/logs/slurm").glob("*.pkl"))
    assert ended("--slurm", "--status", told["id"]) == 0
    assert capfd.readouterr().out == f"{told['id']}  COMPLETED  0\n"


@pytest.mark.slow
@needs_slurm
def test_a_verdict_is_the_jobs_exit_code(folder: Path) -> None:
    there = place(folder, 'echo "gpus $ROCR_VISIBLE_DEVICES"; pwd; exit 3', sbatch={"gres": "gpu:2"})
    job = submitted(there, task("tiny-ptpc-fp8kv", cpus=2))
    code, log = followed(there, job)
    assert log.startswith(f"gpus 0,1\n{folder}\n")
    assert (there.state(job).status, code) == ("FAILED", 3)


@pytest.mark.slow
@needs_slurm
def test_before_its_time_is_up_it_goes_back_to_the_queue(folder: Path) -> None:
    """The signal that Slurm sends then is sent by hand; what it sends to the run is its own SIGTERM."""
    begun = folder / "begun"
    first = f"trap 'echo ended by SIGTERM; exit 143' TERM; touch {begun}; sleep 60 & wait"
    there = place(folder, f'echo "turn $SLURM_RESTART_COUNT"; [ -n "$SLURM_RESTART_COUNT" ] && exit 4; {first}')
    job = submitted(there, task("tiny-ptpc-fp8kv"))
    slurm.until(begun.exists, folder)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    slurm.until(lambda: there.state(job).status == "PENDING", folder)
    # Slurm waits two minutes before a second turn, so that nothing of the first is left; what begins within the second
    # in which the first was killed is not launched ("already killed, do not launch batch job").
    slurm.until(lambda: slurm.idle(dict(os.environ)), folder)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"], check=True)
    code, log = followed(there, job)
    lines = [line for line in log.splitlines() if line.startswith(("turn", "ended"))]
    assert (code, lines) == (4, ["turn ", "ended by SIGTERM", "turn 1"])


@pytest.mark.slow
@needs_slurm
def test_a_job_is_ended_and_a_wrong_one_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun = folder / "begun"
    there = place(folder, f"touch {begun}; exec sleep 60", sbatch={"comment": "it's ours; $(really)"})
    job = submitted(there, task("tiny-ptpc-fp8kv"))
    slurm.until(begun.exists, folder)
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    assert "Comment=it's ours; $(really)" in shown
    subprocess.run(["scancel", job], check=True)
    slurm.until(lambda: there.state(job).exit_code is not None, folder)
    assert there.state(job).status == "CANCELLED"
    with pytest.raises(UserError, match="Slurm knows no job 999999"):
        there.state("999999")
    wrong = Slurm(SlurmOptions(partition="none"), folder=folder, logs=folder / "logs")
    with pytest.raises(UserError, match=r"sbatch refused: .*invalid partition"):
        wrong.submit(task("tiny-ptpc-fp8kv"))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("word", "code", "found"),
    [
        ("RUNNING", "0:0", None),
        ("COMPLETED", "0:0", 0),
        ("FAILED", "4:0", 4),
        ("CANCELLED by 1000", "0:15", 143),
        ("TIMEOUT", "0:15", 5),
        ("NODE_FAIL", "1:0", 5),  # Slurm's own 1, and no verdict
        ("OUT_OF_MEMORY", "0:125", 5),
        ("FAILED", "0:9", 137),
        ("A_STATE_OF_NEXT_YEAR", "0:0", None),
    ],
)
def test_what_a_state_means(word: str, code: str, found: int | None) -> None:
    assert _state(word, code).exit_code == found


@pytest.mark.parametrize(
    ("word", "reason", "waits"),
    [("PENDING", "Priority", "Priority"), ("PENDING", "None", None), ("RUNNING", "x", None)],
)
def test_what_a_reason_is(word: str, reason: str, waits: str | None) -> None:
    assert _state(word, "0:0", reason).waits == waits


def test_the_log_is_where_slurm_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a team/store/logs/slurm/4711_0_log.out"
    log.parent.mkdir(parents=True)
    log.write_text("a line\n", encoding="utf-8")
    told = "JobId=4711 JobName=x JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 Comment=JobState=RUNNING"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{told}'\n", encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    there = Slurm(SlurmOptions(), folder=tmp_path, logs=log.parent)
    shown: list[str] = []
    there.show_log("4711", shown.append)
    with log.open("a", encoding="utf-8") as file:
        file.write("another\n")
    there.show_log("4711", shown.append)
    assert shown == ["a line\n", "another\n"]
    assert there.state("4711").exit_code == 5, "slurmd ends so what it could not start"
    (log.parent / "4711.code").write_text("3\n", encoding="utf-8")
    assert there.state("4711").exit_code == 3


def test_what_the_controller_has_forgotten_the_run_has_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n", encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    there = Slurm(SlurmOptions(), folder=tmp_path, logs=tmp_path)
    with pytest.raises(UserError, match=r"Slurm knows no job 4711: Invalid job id"):
        there.state("4711")
    (tmp_path / "4711.code").write_text("3\n", encoding="ascii")
    assert there.state("4711").exit_code == 3


@pytest.mark.parametrize("begun", ["", "14", "\n"])
def test_a_code_that_is_being_written_is_none_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str) -> None:
    told = "JobId=4711 JobName=x JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '{told}'\n", encoding="utf-8")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    there = Slurm(SlurmOptions(), folder=tmp_path, logs=tmp_path)
    (tmp_path / "4711.code").write_text(begun, encoding="ascii")
    assert there.state("4711").exit_code == 5
    scontrol.write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="Slurm knows no job 4711"):
        there.state("4711")


def test_the_run_notes_its_code_in_one_step(tmp_path: Path) -> None:
    noted = tmp_path / "4711.code"
    (record,) = re.findall("^record='(.*)'$", script(task("tiny-ptpc-fp8kv")), re.MULTILINE)
    run = ["sh", "-c", record, str(noted), "sh", "-c", f'ls "{tmp_path}"; exit 143']
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, noted.read_text()) == (143, "", "143\n")
    assert [path.name for path in tmp_path.iterdir()] == ["4711.code"]
