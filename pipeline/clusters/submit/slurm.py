"""Slurm as a place: a batch script by submitit's writer, and what Slurm's own commands say of its job.

submitit's own way to run something is a pickled function that a second process loads: with it a run's exit code and
its log while it runs would be lost, SIGTERM would be swallowed, and a file that anyone with the folder's rights could
replace would be executed. Its writer takes a command as well, and that is what is used here.

srun, its plugins and `ray symmetric-run` end with 0 and 1 of their own where an image, a node or Ray did not start,
which a run says of a checkpoint. So the run's code is noted beside its log, and without one the script ends with 5.
"""

from __future__ import annotations

import codecs
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from math import ceil
from os.path import normpath
from pathlib import Path
from typing import Any, Literal

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.clusters.submit.place import (
    BROKEN,
    State,
    Submitted,
    Task,
    program_here,
    require_job,
    require_no_secret,
    require_plain,
)
from quantmint.pipeline.clusters.submit.pod import by_digest
from quantmint.pipeline.serving.environment import IMAGE_VARIABLE
from quantmint.pipeline.serving.render.kubernetes import object_name
from quantmint.pipeline.store.disk import disk_errors

WARNING_S = 120
"""Seconds before the time limit at which the job leaves for the queue."""
ROUNDS = 3
"""How often it does so: a run that gets nowhere in its time does not stay for ever."""
_PORT = 6379
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_AGAIN = (
    f'again() {{ [ "${{SLURM_RESTART_COUNT:-0}}" -ge {ROUNDS} ] || scontrol requeue "$SLURM_JOB_ID"; }}',
    "trap again USR1",
)
# It outlives the SIGTERM that the run gets as well. Who asks meanwhile sees no half of the code: it comes by a rename.
_NOTED = 'trap : TERM; "$@"; code=$?; echo "$code" > "$0.new" && mv -f "$0.new" "$0"; exit "$code"'
# A trapped signal ends the first wait, and not the run.
_WAIT = "\n".join(
    (
        "run=$!",
        'wait "$run"',
        "code=$?",
        'while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done',
        '[ -s "$ended" ] || echo "the run came to no end of its own: srun ended with $code"',
        'code=$(cat "$ended" 2>/dev/null)',
        f'exit "${{code:-{BROKEN}}}"',
    )
)
# Slurm numbers AMD's GPUs by ROCR_VISIBLE_DEVICES, which Ray refuses (ray/_private/accelerators/amd_gpu.py).
_RENAMED = (
    'if [ -n "$ROCR_VISIBLE_DEVICES" ]; then export HIP_VISIBLE_DEVICES="$ROCR_VISIBLE_DEVICES"; fi; '
    'unset ROCR_VISIBLE_DEVICES; exec "$@"'
)
# Ray's own 30 s are short for an environment on a network's filesystem.
_PATIENT = "export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600"
_OPTION = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_TIMEOUT_S = 60
# https://slurm.schedmd.com/job_state_codes.html; all others wait, run, or are put into the queue again.
_ENDED = re.compile(
    "BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|LAUNCH_FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT"
)
_WAITS = ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
_SIGNALS = range(1, 32)
_NUMBER = (r"\d{1,12}", "the number that sbatch gave it")
_UNREACHABLE = re.compile(
    r"unable to contact|connection (refused|timed out)|socket timed out|communication", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a cluster wants to know; None and empty leave it to the cluster.

    ``sbatch`` are further options by their long names, True for one that has no value, and count before ours.
    ``setup`` are commands of the script that come first. ``container`` is an image for the cluster's container plugin
    (pyxis), or a ``.sif`` file for Apptainer, with ``mounts`` ("/path:/path-inside") besides the working folder, the
    store, the recipe's folder and ``hub``, the Hub's cache.
    """

    partition: str | None = None
    sbatch: Mapping[str, str | Literal[True]] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    container: str | None = None
    mounts: tuple[str, ...] = ()
    hub: Path | None = None


def script(task: Task, options: Options, *, folder: Path, logs: Path) -> str:
    """The file that sbatch gets. ``folder`` is where the run starts, ``logs`` where Slurm writes; both absolute."""
    from submitit.slurm import slurm

    given = parameters(task, options, folder, logs)
    text: str = slurm._make_sbatch_string(command(task, options, folder), logs, **given)
    return text


def parse_options(given: tuple[str, ...]) -> dict[str, str | Literal[True]]:
    """``NAME=VALUE``, or ``NAME`` alone for an option that has no value."""
    options: dict[str, str | Literal[True]] = {}
    for text in given:
        name, found, value = text.partition("=")
        if not _OPTION.fullmatch(name):
            raise UserError(f"--sbatch: found {name!r}, expected NAME=VALUE or NAME, as in mail-type=END or exclusive")
        options[name] = value if found else True
    return options


def parse_mount(text: str) -> str:
    """``/path``, or ``/path:/path-in-the-container``, as source and target."""
    source, _, target = text.partition(":")
    for path in (source, target or source):
        require_plain("--mount", path)
        if not path.startswith("/") or set(path) & set(",:"):
            raise UserError(f"--mount: found {text!r}, expected /path or /path:/path, without commas")
    return f"{source}:{target or source}"


def parameters(task: Task, options: Options, folder: Path, logs: Path) -> dict[str, Any]:
    """Arguments of submitit's `SlurmExecutor.update_parameters`."""
    given = {} if options.partition is None else {"partition": options.partition}
    lines = [("--setup", line) for line in options.setup]
    for name, value in [*given.items(), *options.sbatch.items(), *lines, ("the working folder", str(folder))]:
        if isinstance(value, str):
            require_plain(name, value)
            for assigned in _ASSIGNED.findall(value):
                require_no_secret(name, assigned, "Export it before you submit: sbatch takes your environment along.")
    own = {name.replace("-", "_"): value for name, value in options.sbatch.items()}  # submitit's names, and so ours
    warning = WARNING_S if task.seconds is None else max(1, min(WARNING_S, int(task.seconds / 4)))
    gpus = {} if not task.gpus or "gres" in own else {"gpus_per_node": task.gpus}
    # Since Slurm 22.05 a step does not take the job's CPUs by itself.
    cpus = [] if task.cpus is None else [f"--cpus-per-task={task.cpus}"]
    return {
        "job_name": object_name("quantmint-", task.name),
        **given,
        "nodes": task.nodes,
        "ntasks_per_node": 1,
        **gpus,
        **({} if task.cpus is None else {"cpus_per_task": task.cpus}),
        **({} if task.memory_gb is None else {"mem": f"{task.memory_gb}GB"}),
        "time": None if task.seconds is None else ceil(task.seconds / 60),
        "wckey": None,
        "stderr_to_stdout": True,
        "setup": [
            *options.setup,
            *_environment(task, options),
            *_AGAIN,
            f'ended={shlex.quote(str(logs))}/"$SLURM_JOB_ID".code; rm -f "$ended"',
        ],
        "srun_args": ["--open-mode=append", "--kill-on-bad-exit=1", *cpus, *_container(task, options, folder)[0]],
        "additional_parameters": {
            "chdir": str(folder),
            **({} if "no_requeue" in own else {"requeue": True}),
            "signal": f"B:USR1@{warning}",
            **own,
        },
    }


def command(task: Task, options: Options, folder: Path) -> str:
    """What follows `srun` and its arguments, as a shell reads it, and how the script ends."""
    inside = options.container is not None
    words = task.words("quantmint") if inside else task.words(*program_here())
    if inside and options.hub is not None:  # an image may have a value of its own
        words = ("env", f"HF_HOME={options.hub}", *words)
    _, before = _container(task, options, folder)
    noted = f'{shlex.join(("sh", "-c", _NOTED))} "$ended" {shlex.join(words)}'
    if task.nodes == 1:
        line = f"{shlex.join(before)} {noted}".lstrip()
    else:
        renamed = ("bash", "-c", _RENAMED, "bash") if task.kind == "rocm" and task.gpus else ()
        cluster = ("--min-nodes", str(task.nodes), "--num-gpus", str(task.gpus), "--")
        start = shlex.join((*renamed, *before, "ray", "symmetric-run", "--address"))
        head = f'"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{_PORT}"'
        line = f"{start} {head} {shlex.join(cluster)} {noted}"
    return f"{line} &\n{_WAIT}"


def _environment(task: Task, options: Options) -> list[str]:
    # sbatch takes the submitter's environment along, which may name an image that this job is not in.
    image = options.container if options.container is not None and by_digest(options.container) else None
    lines = [f"unset {IMAGE_VARIABLE}" if image is None else f"export {IMAGE_VARIABLE}={shlex.quote(image)}"]
    if task.nodes > 1:
        lines.append(_PATIENT)
        if options.container is None:  # Ray calls itself by its name
            lines.append(f'export PATH={shlex.quote(str(Path(program_here()[0]).parent))}:"$PATH"')
    return lines


def _mounts(task: Task, options: Options, folder: Path) -> str:
    """The host's folders at their own paths, by links' names and by where they lead; outer ones come first."""
    recipe = folder / task.recipe
    paths = [folder, folder / task.store, *([recipe.parent] if recipe.is_file() else []), options.hub or folder]
    names = dict.fromkeys(Path(normpath(name)) for path in paths for name in (path, path.resolve()))
    taken = {Path(mount.partition(":")[2]) for mount in options.mounts}
    ours = [f"{name}:{name}" for name in names if name not in taken and not (taken | names.keys()) & {*name.parents}]
    return ",".join(sorted([*options.mounts, *ours], key=lambda mount: mount.partition(":")[2].count("/")))


def _container(task: Task, options: Options, folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """srun's own arguments where pyxis runs the image, and the words before the command where Apptainer does."""
    image = options.container
    if image is None:
        return [], ()
    require_plain("--container", image)
    mounts = _mounts(task, options, folder)
    if not image.endswith(".sif"):
        pyxis = {"image": image, "mounts": mounts, "workdir": folder}
        return [f"--container-{name}={value}" for name, value in pyxis.items()], ()
    device = {"rocm": ("--rocm",), "cuda": ("--nv",), "cpu": ()}[task.kind]
    return [], ("apptainer", "exec", *device, "--bind", mounts, "--pwd", str(folder), image)


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
        from submitit.core.utils import FailedJobError

        executor = SlurmExecutor(self._logs)
        executor.update_parameters(**parameters(task, self._options, self._folder, self._logs))
        if self._options.hub is not None:  # what is not there cannot be mounted
            with disk_errors(self._options.hub):
                self._options.hub.mkdir(parents=True, exist_ok=True)
        try:
            with disk_errors(self._logs), redirect_stderr(StringIO()):  # submitit prints what it raises
                self._logs.mkdir(parents=True, exist_ok=True)
                job = executor._submit_command(command(task, self._options, self._folder))
        except FailedJobError as error:
            raise _failure("sbatch", str(error)) from error
        return Submitted(str(job.job_id), str(job.paths.stdout))

    def state(self, identifier: str) -> State:
        """What the controller knows; what the run noted, where it has forgotten."""
        job = require_job(identifier, *_NUMBER)
        told = _run("scontrol", "--oneliner", "show", "job", job)
        if told.returncode == 0:
            # The first of a name: a comment comes later, and may read like anything.
            fields = dict(part.split("=", 1) for part in reversed(told.stdout.split()) if "=" in part)
            state = _state(fields.get("JobState", "UNKNOWN"), fields.get("ExitCode", "0:0"), fields.get("Reason", ""))
            return self._of_the_run(state, job)
        if _UNREACHABLE.search(told.stderr):
            raise _failure("scontrol", told.stderr)
        code = self._noted(job)
        if code is not None:
            return State("ENDED", code)
        raise UserError(
            f"Slurm knows no job {job}: {told.stderr.strip()}",
            hint=f"The controller forgets finished jobs after some minutes. Its log is {self._log(job)}.",
        )

    def show_log(self, identifier: str, show: Callable[[str], None]) -> None:
        """What the log file has grown by."""
        log = self._log(require_job(identifier, *_NUMBER))
        if log.is_file():
            with log.open("rb") as file:
                file.seek(self._shown)
                piece = file.read()
            self._shown += len(piece)
            show(self._text.decode(piece))

    def _of_the_run(self, state: State, job: str) -> State:
        """A job that ended with a status before its run did (see `script`) has said nothing of a checkpoint."""
        silent = state.word == "FAILED" and self._logs.is_dir() and self._noted(job) is None
        return State(state.word, BROKEN) if silent else state

    def _noted(self, job: str) -> int | None:
        """The exit code that the run noted; None where there is none, or not the whole of it (a disk that was full)."""
        try:
            text = (self._logs / f"{job}.code").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        # Without the newline at its end a 1 may be the beginning of 143.
        return int(text) if text.endswith("\n") and text.strip().isdecimal() else None

    def _log(self, job: str) -> Path:
        from submitit.core.utils import JobPaths

        return Path(JobPaths(self._logs, job_id=job, task_id=0).stdout)


def _state(word: str, code: str, reason: str = "") -> State:
    word = word.split()[0].rstrip("+")  # "CANCELLED by 1000"
    if not _ENDED.fullmatch(word):
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
