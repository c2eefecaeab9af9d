"""Slurm as a place: submitit sends the script, Slurm's own commands say how it went.

submitit asks the accounting for states. Small clusters have none, and it does not tell exit codes: the controller is
asked, which knows a job for some minutes after its end, then the accounting.
"""

from __future__ import annotations

import codecs
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from pipeline.base.errors import StageError, UserError
from pipeline.clusters.submit.place import BROKEN, State, Submitted
from pipeline.clusters.submit.script import Options, command, parameters, script
from pipeline.clusters.submit.task import Task
from pipeline.store.disk import disk_errors

_TIMEOUT_S = 60
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

    def __init__(self, options: Options, *, folder: Path, logs: Path) -> None:
        self._options = options
        self._folder = folder
        self._logs = logs
        self._shown = 0  # bytes
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")

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
        told = _run("scontrol", "--oneliner", "show", "job", job)
        if told.returncode == 0:
            # The first of a name: a comment comes later, and may read like anything.
            fields = dict(part.split("=", 1) for part in reversed(told.stdout.split()) if "=" in part)
            state = _state(fields.get("JobState", "UNKNOWN"), fields.get("ExitCode", "0:0"), fields.get("Reason", ""))
            return self._of_the_run(state, job)
        if _UNREACHABLE.search(told.stderr):
            raise _failure("scontrol", told.stderr)
        kept = _run("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job)
        if kept.returncode != 0 and _UNREACHABLE.search(kept.stderr):
            raise _failure("sacct", kept.stderr)
        if kept.returncode != 0 or not kept.stdout.strip():
            raise UserError(
                f"Slurm knows no job {job}: {told.stderr.strip() or 'it has forgotten it'}",
                hint="The controller forgets finished jobs after some minutes, and there is no accounting of it. "
                f"Its log is {self._log(job)}.",
            )
        word, _, code = kept.stdout.strip().splitlines()[-1].partition("|")
        return self._of_the_run(_state(word, code), job)

    def show_log(self, identifier: str, show: Callable[[str], None]) -> None:
        """What the log file has grown by."""
        log = self._log(_number(identifier))
        if log.is_file():
            with log.open("rb") as file:
                file.seek(self._shown)
                piece = file.read()
            self._shown += len(piece)
            show(self._text.decode(piece))

    def cancel(self, identifier: str) -> None:
        """`scancel`, as submitit does it."""
        job = _number(identifier)
        self.state(job)  # scancel says nothing of a job that it does not know
        done = _run("scancel", job)
        if done.returncode != 0:
            raise _failure("scancel", done.stderr)

    def _of_the_run(self, state: State, job: str) -> State:
        """A job that ended with a status before its run did (see `script`) has said nothing of a checkpoint."""
        logs = self._log(job).parent if state.word == "FAILED" else None
        noted = logs is None or not logs.is_dir() or (logs / f"{job}.code").is_file()
        return state if noted else State(state.word, BROKEN)

    def _log(self, job: str) -> Path:
        """Where Slurm says that it writes, wherever we were started; our folder's, once it has forgotten."""
        if told := _WRITES.search(_run("scontrol", "--oneliner", "show", "job", job).stdout):
            return Path(told[1])
        from submitit.core.utils import JobPaths

        return Path(JobPaths(self._logs, job_id=job, task_id=0).stdout)


def _state(word: str, code: str, reason: str = "") -> State:
    word = word.split()[0].rstrip("+")  # "CANCELLED by 1000"
    if word not in _ENDED:
        waits = word in _WAITS and reason not in {"", "None", "(null)"}
        return State(word, waits=reason.replace("_", " ") if waits else None)
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
