"""A task as a batch script of Slurm, by submitit's writer.

    >>> print(script(task, Options(partition="mi300x"), folder=Path("/shared/models")))
    #!/bin/bash
    ...

submitit's own way to run something is a pickled function that a second process loads: with it a run's exit code and
its log while it runs would be lost, SIGTERM would be swallowed, and a file that anyone with the folder's rights could
replace would be executed. Its writer takes a command as well, and that is what is used here.

Before the time limit the job puts itself back into the queue, a few times; a preempted one is put there by Slurm. Both
go on where they stopped. The processes of the run get Slurm's SIGTERM, the script's shell does not.

srun, its plugins and `ray symmetric-run` end with 0 and 1 of their own where an image, a node or Ray did not start,
which a run says of a checkpoint. So the run's code is noted beside its log, and without one the script ends with 5.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Literal

from pipeline.base.errors import UserError
from pipeline.clusters.submit.mounts import Mount, Needs, mounts_of
from pipeline.clusters.submit.place import BROKEN
from pipeline.clusters.submit.pod import by_digest
from pipeline.clusters.submit.task import Task, program_here, require_no_secret, require_plain
from pipeline.serving.environment import IMAGE_VARIABLE
from pipeline.serving.render.kubernetes import object_name

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
# It outlives the SIGTERM that the run gets as well.
_NOTED = 'trap : TERM; "$@"; code=$?; echo "$code" > "$0"; exit "$code"'
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


@dataclass(frozen=True, slots=True)
class Options:
    """What a cluster wants to know; None and empty leave it to the cluster.

    ``sbatch`` are further options by their long names, True for one that has no value, and count before ours.
    ``setup`` are commands that come first, each read as words. ``venv`` is an environment on the shared filesystem,
    ``container`` an image for the cluster's container plugin (pyxis), or a ``.sif`` file for Apptainer, with ``mounts``
    besides what the run ``needs`` at its own paths.
    """

    partition: str | None = None
    account: str | None = None
    gres: str | None = None
    sbatch: Mapping[str, str | Literal[True]] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    venv: str | None = None
    container: str | None = None
    mounts: tuple[Mount, ...] = ()
    needs: Needs = field(default_factory=Needs)


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


def parameters(task: Task, options: Options, folder: Path, logs: Path) -> dict[str, Any]:
    """Arguments of submitit's `SlurmExecutor.update_parameters`."""
    given = {name: getattr(options, name) for name in ("partition", "account", "gres")}
    for name, value in [*given.items(), *options.sbatch.items(), ("the working folder", str(folder))]:
        if isinstance(value, str):
            require_plain(name, value)
            _no_secret(name, value)
    for name, path in (("the working folder", folder), ("the folder of logs", logs)):
        if "%" in str(path):
            raise UserError(f"{name} is {path}: Slurm reads % in a path as a pattern")
    own = {name.replace("-", "_"): value for name, value in options.sbatch.items()}  # submitit's names, and so ours
    warning = WARNING_S if task.seconds is None else max(1, min(WARNING_S, int(task.seconds / 4)))
    gpus = {} if not task.gpus or options.gres is not None else {"gpus_per_node": task.gpus}
    return {
        "job_name": object_name("quantmint-", task.name),
        **{name: value for name, value in given.items() if value is not None},
        "nodes": task.nodes,
        "ntasks_per_node": 1,
        **gpus,
        **({} if task.cpus is None else {"cpus_per_task": task.cpus}),
        **({} if task.memory_gb is None else {"mem": f"{task.memory_gb}GB"}),
        "time": None if task.seconds is None else ceil(task.seconds / 60),
        "wckey": None,
        "stderr_to_stdout": True,
        "setup": [
            *(shlex.join(_words(line)) for line in options.setup),
            *_environment(task, options),
            *_AGAIN,
            f'ended={shlex.quote(str(logs))}/"$SLURM_JOB_ID".code; rm -f "$ended"',
        ],
        "srun_args": [*_steps(task), *_plugin(task, options, folder)],
        "additional_parameters": {
            "chdir": str(folder),
            **({} if "no_requeue" in own else {"requeue": True}),
            "signal": f"B:USR1@{warning}",
            **own,
        },
    }


def command(task: Task, options: Options, folder: Path) -> str:
    """What follows `srun` and its arguments, as a shell reads it, and how the script ends."""
    if options.container is not None and options.venv is not None:
        raise UserError("found --venv and --container, expected one of them: an image has its own environment")
    inside = options.container is not None
    words = task.words("quantmint") if inside else task.words(*program_here(options.venv))
    if options.mounts and not inside:
        raise UserError("found --mount without --container: a run outside of an image sees what its node sees")
    if inside and options.needs.variables:
        words = ("env", *(f"{name}={value}" for name, value in options.needs.variables.items()), *words)
    before = _apptainer(task, options, folder) if inside else ()
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


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UserError(f"--setup: {line!r} cannot be read as words: {error}") from error
    if not words:
        raise UserError("--setup: found nothing, expected a command such as 'module load rocm'")
    require_plain("--setup", line)
    _no_secret("--setup", line)
    return words


def _no_secret(option: str, text: str) -> None:
    for name in _ASSIGNED.findall(text):
        require_no_secret(option, name, "Export it before you submit: sbatch takes your environment along.")


def _environment(task: Task, options: Options) -> list[str]:
    patient = [] if task.nodes == 1 else [_PATIENT]
    if options.container is not None:
        return [_image(options.container), *patient]
    if task.nodes == 1:
        return [_image(None)]
    # Ray calls itself by its name.
    path = shlex.quote(str(Path(program_here(options.venv)[0]).parent))
    return [_image(None), *patient, f'export PATH={path}:"$PATH"']


def _image(container: str | None) -> str:
    """sbatch takes the submitter's environment along, which may name an image that this job is not in."""
    if container is None or not by_digest(container):
        return f"unset {IMAGE_VARIABLE}"
    return f"export {IMAGE_VARIABLE}={shlex.quote(container)}"


def _mounts(task: Task, options: Options, folder: Path) -> tuple[str, ...]:
    paths = (folder, folder / task.store, *options.needs.read, *options.needs.written)
    return tuple(f"{mount.source}:{mount.target}" for mount in mounts_of(paths, options.mounts))


def _steps(task: Task) -> list[str]:
    # Since Slurm 22.05 a step does not take the job's CPUs by itself.
    cpus = [] if task.cpus is None else [f"--cpus-per-task={task.cpus}"]
    return ["--open-mode=append", "--kill-on-bad-exit=1", *cpus]


def _plugin(task: Task, options: Options, folder: Path) -> list[str]:
    if options.container is None or options.container.endswith(".sif"):
        return []
    require_plain("--container", options.container)
    mounts = _mounts(task, options, folder)
    if blank := next((mount for mount in mounts if " " in mount), None):  # https://github.com/NVIDIA/pyxis/issues/133
        raise UserError(
            f"--container: found a blank in {blank}, which pyxis cannot mount",
            hint="Apptainer (a .sif file) can.",
        )
    return [
        f"--container-image={options.container}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={folder}",
    ]


def _apptainer(task: Task, options: Options, folder: Path) -> tuple[str, ...]:
    image = options.container
    if image is None or not image.endswith(".sif"):
        return ()
    require_plain("--container", image)
    device = {"rocm": ("--rocm",), "cuda": ("--nv",), "cpu": ()}[task.kind]
    return (
        "apptainer",
        "exec",
        *device,
        "--bind",
        ",".join(_mounts(task, options, folder)),
        "--pwd",
        str(folder),
        image,
    )
