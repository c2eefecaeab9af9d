"""Slurm as a place: submitit sends the script and cancels, Slurm's own commands say how it went.

submitit asks the accounting for states. Small clusters have none, and it does not tell exit codes: the controller is
asked, which knows a job for some minutes after its end, then the accounting.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

from pipeline.errors import StageError, UserError
from pipeline.store.disk import disk_errors
from pipeline.submit.place import BROKEN, State, Submitted
from pipeline.submit.sbatch import Options, code_file, command, parameters, script
from pipeline.submit.task import Task
from pipeline.submit.waiting import in_slurm

_TIMEOUT_S = 60
_PAUSE_S = 3.0
# https://slurm.schedmd.com/job_state_codes.html; all others wait, run, or are put into the queue again.
_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
_WAITS = ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
_WRITES = re.compile(r" StdOut=(/.*?)(?= [A-Z][A-Za-z/:]*=|\n|$)")
_SIGNALS = range(1, 32)
_UNREACHABLE = re.compile(
    r"unable to contact|connection (refused|timed out)|socket timed out|communication", re.IGNORECASE
)


class Slurm:
    """The cluster whose commands are on PATH. ``logs`` is a folder on the shared filesystem."""

    def __init__(self, options: Options, *, folder: Path, logs: Path, pause_s: float = _PAUSE_S) -> None:
        self._options = options
        self._folder = folder
        self._logs = logs
        self._pause_s = pause_s

    def text(self, task: Task) -> str:
        """The batch script."""
        return script(task, self._options, folder=self._folder, logs=self._logs)

    def submit(self, task: Task) -> Submitted:
        """Write the script into the folder of logs and give it to sbatch."""
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise UserError(
                "found no sbatch on PATH", hint="Submit from a login node; --dry-run prints the script anywhere."
            )
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = SlurmExecutor(self._logs)
        executor.update_parameters(**parameters(task, self._options, self._folder, self._logs))
        for path in self._options.needs.written:  # what is not there cannot be mounted
            with disk_errors(path):
                path.mkdir(parents=True, exist_ok=True)
        try:
            with disk_errors(self._logs), redirect_stderr(StringIO()):  # submitit prints what it raises
                self._logs.mkdir(parents=True, exist_ok=True)
                job = executor._submit_command(command(task, self._options, self._folder))
        except FailedJobError as error:
            raise _failure("sbatch", str(error)) from error
        except FailedSubmissionError as error:
            raise StageError(
                f"sbatch took the job and told no number: {error}", hint="squeue --me tells it."
            ) from error
        return Submitted(str(job.job_id), str(job.paths.stdout))

    def state(self, identifier: str) -> State:
        """What the controller knows; the accounting, where it has forgotten."""
        job = _number(identifier)
        asked = _shown(job)
        if asked.returncode == 0:
            # The first of a name: a comment comes later, and may read like anything.
            fields = dict(part.split("=", 1) for part in reversed(asked.stdout.split()) if "=" in part)
            state = self._said(job, asked.stdout, fields.get("JobState", "UNKNOWN"), fields.get("ExitCode", "0:0"))
            return replace(state, waits=in_slurm(job, fields.get("Reason", ""))) if state.word in _WAITS else state
        if _UNREACHABLE.search(asked.stderr):
            raise _failure("scontrol", asked.stderr)
        kept = _run("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job)
        if kept.returncode != 0 and _UNREACHABLE.search(kept.stderr):
            raise _failure("sacct", kept.stderr)
        if kept.returncode != 0 or not kept.stdout.strip():
            raise UserError(
                f"Slurm knows no job {job}: {asked.stderr.strip() or 'it has forgotten it'}",
                hint="The controller forgets finished jobs after some minutes, and there is no accounting of it. "
                f"Its log is {self._log(job, asked.stdout)}.",
            )
        word, _, code = kept.stdout.strip().splitlines()[-1].partition("|")
        return self._said(job, asked.stdout, word, code)

    def lines(self, identifier: str, seen: Callable[[State], None] | None = None) -> Iterator[str]:
        """The log file, as it grows."""
        job = _number(identifier)
        log, position = self._log(job, _shown(job).stdout), 0
        while True:
            state = self.state(identifier)  # before reading: what comes after the last look would be lost
            ended = state.ended
            if seen is not None:
                seen(state)
            if log.is_file():
                with log.open("rb") as file:
                    file.seek(position)
                    piece = file.read()
                if not ended:  # only whole lines: a character is not cut in two
                    piece = piece[: piece.rfind(b"\n") + 1]
                position += len(piece)
                if piece:
                    yield piece.decode("utf-8", errors="replace")
            if ended:
                return
            time.sleep(self._pause_s)

    def cancel(self, identifier: str) -> None:
        """`scancel`, as submitit does it."""
        job = _number(identifier)
        self.state(job)  # scancel says nothing of a job that it does not know
        done = _run("scancel", job)
        if done.returncode != 0:
            raise _failure("scancel", done.stderr)

    def _said(self, job: str, shown: str, word: str, code: str) -> State:
        """The state; a job that ended with a status before its run did has said nothing of a checkpoint."""
        state = _state(word, code)
        logs = self._log(job, shown).parent
        if state.word == "FAILED" and logs.is_dir() and not code_file(logs, job).is_file():
            return State(state.word, BROKEN)
        return state

    def _log(self, job: str, shown: str) -> Path:
        """Where Slurm says that it writes, wherever we were started; our folder's, once it has forgotten."""
        if told := _WRITES.search(shown):
            return Path(told[1])
        from submitit.core.utils import JobPaths

        return Path(JobPaths(self._logs, job_id=job, task_id=0).stdout)


def _shown(job: str) -> subprocess.CompletedProcess[str]:
    return _run("scontrol", "--oneliner", "show", "job", job)


def _state(word: str, code: str) -> State:
    word = word.split()[0].rstrip("+")  # "CANCELLED by 1000"
    if word not in _ENDED:
        return State(word)
    if word == "COMPLETED":
        return State(word, 0)
    status, _, signal = code.partition(":")
    # Slurm has a status of its own for a node that failed, and 125 and 53 for memory and files where a signal stands.
    if word == "FAILED" and int(status or 0):
        return State(word, int(status))
    if word in ("FAILED", "CANCELLED") and int(signal or 0) in _SIGNALS:
        return State(word, 128 + int(signal))
    return State(word, BROKEN)


def _number(identifier: str) -> str:
    if not re.fullmatch(r"\d{1,12}", identifier):
        raise UserError(f"found the job {identifier!r}, expected the number that sbatch gave it")
    return identifier


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise UserError(f"found no {words[0]} on PATH", hint="Ask from a node of the cluster.") from error
    except subprocess.TimeoutExpired as error:
        raise StageError(f"{words[0]} gave no answer within {_TIMEOUT_S} s", transient=True) from error


def _failure(what: str, said: str) -> UserError | StageError:
    said = " ".join(said.split())
    if _UNREACHABLE.search(said):
        return StageError(f"Slurm's controller cannot be reached: {said}", transient=True)
    return UserError(f"{what} refused: {said}")
