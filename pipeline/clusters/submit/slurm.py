"""Slurm: a batch script from the template slurm.sh.j2, and the job's state from Slurm's own commands.

srun, its plugins and `ray symmetric-run` end with 0 or 1 when an image, a node or Ray did not start, and a run says the
same of a checkpoint. So the run writes its exit code to a file beside its log; without that file the job counts as 5.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from os.path import normpath
from pathlib import Path
from typing import Literal

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.clusters.submit import job
from quantmint.pipeline.clusters.submit.job import BROKEN, JobRequest, JobState, Scheduler, SubmittedJob
from quantmint.pipeline.clusters.submit.pod import has_digest
from quantmint.pipeline.serving.environment import IMAGE_VARIABLE
from quantmint.pipeline.serving.render.kubernetes import object_name
from quantmint.pipeline.store.disk import disk_errors

WARNING_S = 120
"""Seconds before the time limit at which the job goes back to the queue."""
ROUNDS = 3
"""Number of times that it does."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_TIMEOUT_S = 60
_TEMPLATE = Path(__file__).with_name("slurm.sh.j2")
# https://slurm.schedmd.com/job_state_codes.html; jobs in all other states wait, run, or return to the queue.
_ENDED = re.compile(
    "BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|LAUNCH_FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT"
)
_PENDING = ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
_SIGNALS = range(1, 32)
_JOB_ID = (r"\d{1,12}", "the number that sbatch gave it")
_UNREACHABLE = re.compile(
    r"unable to contact|connection (refused|timed out)|socket timed out|communication", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The user's options; None and empty ones leave the choice to the cluster.

    ``sbatch`` are further options by their long names (True for one without a value); they replace ours. ``setup`` are
    shell commands at the start of the script. ``container`` is an image for pyxis, or a ``.sif`` file for Apptainer. It
    sees ``mounts`` ("/path:/path-inside"), the working folder, the store, the recipe's folder and the Hub's cache
    ``hub``.
    """

    partition: str | None = None
    sbatch: Mapping[str, str | Literal[True]] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    container: str | None = None
    mounts: tuple[str, ...] = ()
    hub: Path | None = None


def script(request: JobRequest, options: SlurmOptions, *, folder: Path, logs: Path) -> str:
    """Return the batch script of a run that starts in ``folder``, with its log in ``logs``; both are absolute.

    Raises `UserError` for text that is not printable and for values of secrets.
    """
    named = [("--partition", options.partition), *options.sbatch.items(), ("the working folder", str(folder))]
    for name, value in [*named, *(("--setup", line) for line in options.setup)]:
        if isinstance(value, str):
            job.require_printable(name, value)
            for variable in _ASSIGNMENT.findall(value):
                hint = "Export it before you submit: sbatch takes your environment along."
                job.refuse_secret(name, variable, hint)
    container = None if options.container is None else "apptainer" if options.container.endswith(".sif") else "pyxis"
    if options.container is not None:
        job.require_printable("--container", options.container)
    program = job.quantmint_program()
    words = request.command(*(program if container is None else ("quantmint",)))
    if container is not None and options.hub is not None:  # an image may set a value of its own
        words = ("env", f"HF_HOME={options.hub}", *words)
    return job.render(
        _TEMPLATE,
        request=request,
        options=options,
        folder=folder,
        logs=logs,
        log=partial(_log, logs),
        words=words,
        program_folder=Path(program[0]).parent,
        container=container,
        mounts="" if container is None else _mounts(request, options, folder),
        pinned=options.container is not None and has_digest(options.container),
        image_variable=IMAGE_VARIABLE,
        job_name=object_name("quantmint-", request.name),
        warning=WARNING_S if request.seconds is None else max(1, min(WARNING_S, int(request.seconds / 4))),
        rounds=ROUNDS,
        broken=BROKEN,
    )


def _mounts(request: JobRequest, options: SlurmOptions, folder: Path) -> str:
    """Return the mounts, outer folders first: ours at their own paths, by the names of links and of their targets."""
    recipe = folder / request.recipe
    paths = [folder, folder / request.store, *([recipe.parent] if recipe.is_file() else []), options.hub or folder]
    names = dict.fromkeys(Path(normpath(name)) for path in paths for name in (path, path.resolve()))
    targets = {Path(mount.partition(":")[2]) for mount in options.mounts}
    outer = targets | names.keys()
    ours = [f"{name}:{name}" for name in names if name not in targets and not outer & {*name.parents}]
    return ",".join(sorted([*options.mounts, *ours], key=lambda mount: mount.partition(":")[2].count("/")))


class Slurm(Scheduler):
    """The cluster whose commands are on PATH. ``logs`` is a folder on the shared filesystem."""

    def __init__(self, options: SlurmOptions, *, folder: Path, logs: Path) -> None:
        super().__init__()
        self._options, self._folder, self._logs = options, folder, logs

    def describe(self, request: JobRequest) -> str:
        """Return the batch script."""
        return script(request, self._options, folder=self._folder, logs=self._logs)

    def submit(self, request: JobRequest) -> SubmittedJob:
        """Give the script to sbatch, and return the job's identifier and the path of its log.

        Creates the folders of logs and of the Hub's cache, which is mounted.
        """
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            hint = "Submit from a login node; --dry-run prints the script anywhere."
            raise UserError("found no sbatch on PATH", hint=hint)
        text = self.describe(request)
        for folder in (self._logs, *([] if self._options.hub is None else [self._options.hub])):
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
        answer = _run("sbatch", "--parsable", stdin=text)
        number = re.search(r"^(\d+)(;\S*)?$", answer.stdout, re.MULTILINE)
        if answer.returncode != 0 or number is None:
            raise _failure("sbatch", answer.stderr or answer.stdout)
        return SubmittedJob(number[1], str(_log(self._logs, number[1])))

    def state(self, identifier: str) -> JobState:
        """Return the controller's state; once the controller forgot the job, the exit code that the run wrote."""
        number = job.require_job_id(identifier, *_JOB_ID)
        answer = _run("scontrol", "--oneliner", "show", "job", number)
        code = self._recorded_code(number)
        if answer.returncode == 0:
            # The first of a name counts: a comment comes later, and may read like anything.
            fields = dict(part.split("=", 1) for part in reversed(answer.stdout.split()) if "=" in part)
            state = _state(fields.get("JobState", "UNKNOWN"), fields.get("ExitCode", "0:0"), fields.get("Reason", ""))
            no_verdict = state.status == "FAILED" and code is None and self._logs.is_dir()
            return JobState(state.status, BROKEN) if no_verdict else state
        if _UNREACHABLE.search(answer.stderr):
            raise _failure("scontrol", answer.stderr)
        if code is not None:
            return JobState("ENDED", code)
        raise UserError(
            f"Slurm knows no job {number}: {answer.stderr.strip()}",
            hint=f"The controller forgets finished jobs after some minutes. Its log is {_log(self._logs, number)}.",
        )

    def logs(self, identifier: str) -> Iterator[tuple[str, str]]:
        """Yield the log file's text, if there is a file yet."""
        log = _log(self._logs, job.require_job_id(identifier, *_JOB_ID))
        if log.is_file():  # "ignore" leaves out a character whose bytes are not all written yet
            yield identifier, log.read_text(encoding="utf-8", errors="ignore")

    def _recorded_code(self, number: str) -> int | None:
        """Return the exit code that the run wrote; None for an absent or partial file (on a full disk)."""
        try:
            text = (self._logs / f"{number}.code").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        # Without the newline at its end a 1 may be the beginning of 143.
        return int(text) if text.endswith("\n") and text.strip().isdecimal() else None


def _log(logs: Path, number: str, task: str = "0") -> Path:
    return logs / f"{number}_{task}_log.out"


def _state(status: str, code: str, reason: str = "") -> JobState:
    """Return the state for the fields JobState, ExitCode ("status:signal") and Reason of `scontrol show job`."""
    status = status.split()[0].rstrip("+")  # "CANCELLED by 1000"
    if not _ENDED.fullmatch(status):
        waits = status in _PENDING and reason not in {"", "None", "(null)"}
        return JobState(status, waits=reason.replace("_", " ") if waits else None)
    exit_status, _, signal = code.partition(":")
    if status == "COMPLETED":
        return JobState(status, 0)
    # Slurm has an exit status of its own for a failed node, and 125 and 53 for memory and files in place of a signal.
    if status == "FAILED" and int(exit_status or 0):
        return JobState(status, int(exit_status))
    if status in ("FAILED", "CANCELLED") and int(signal or 0) in _SIGNALS:
        return JobState(status, 128 + int(signal))
    return JobState(status, BROKEN)


def _run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; `UserError` when it is not installed, a transient `StageError` after a minute."""
    try:
        return subprocess.run(
            words, input=stdin, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise UserError(f"found no {words[0]} on PATH", hint="Ask from a node of the cluster.") from error
    except subprocess.TimeoutExpired as error:
        raise StageError(f"{words[0]} gave no answer within {_TIMEOUT_S} s", transient=True) from error


def _failure(command: str, answer: str) -> UserError | StageError:
    answer = " ".join(answer.split())
    if _UNREACHABLE.search(answer):
        return StageError(f"Slurm's controller cannot be reached: {answer}", transient=True)
    return UserError(f"{command} refused: {answer}")
