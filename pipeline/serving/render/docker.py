"""A container of a launch as the arguments of ``docker run``; a list, never a shell string.

    >>> docker_run(plan, containers(processes)[0])[:3]
    ('docker', 'run', '--rm')

The options are the plan's, from the table of knobs. Two that the guides give together exclude each other: with
``--ipc=host`` a container has the host's /dev/shm, and docker sets ``--shm-size`` aside. The table takes the host's,
because the ranks of RCCL meet in it also across the containers of a node; `quantmint doctor` looks at its size.

The network is always the host's, so that the server can listen on the loopback interface like one without a container.
Devices are all passed and selected by CUDA_VISIBLE_DEVICES: a number means the same inside and outside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.invocation import LOOPBACK, contained, image_of, variables


def options(plan: LaunchPlan) -> tuple[tuple[str, str], ...]:
    """What the container gets from the host, as options of `docker run` with their values."""
    words = list(plan.docker)
    pairs: list[tuple[str, str]] = [("--network", "host")]
    while words:
        name, equals, value = words.pop(0).partition("=")
        pairs.append((name, value if equals or not words or words[0].startswith("-") else words.pop(0)))
    return tuple(dict.fromkeys(pairs))


def mounted(plan: LaunchPlan) -> tuple[str, ...]:
    """Folders and files that the plan names by absolute paths, outermost first; they keep their paths inside.

    A snapshot of the Hub's cache holds links to the blobs beside it: the repository's folder stands for it.
    """
    named = [_whole(path) for word in (plan.model, *plan.argv[3:], *plan.env.values()) for path in _paths(word)]
    return tuple(
        path
        for path in dict.fromkeys(named)
        if not any(PurePosixPath(path).is_relative_to(other) for other in named if other != path)
    )


def _paths(word: str) -> Iterator[str]:
    """Absolute paths in an argument, which may be a JSON object (the draft model of --speculative-config)."""
    if word.startswith("{"):
        values = json.loads(word).values()
        yield from (value for value in values if isinstance(value, str) and value.startswith("/"))
    elif word.startswith("/"):
        yield word


def _whole(path: str) -> str:
    parents = PurePosixPath(path).parents
    return next((str(parent.parent) for parent in parents if parent.name == "snapshots"), path)


def docker_run(
    plan: LaunchPlan,
    processes: Sequence[Process],
    *,
    image: str | None = None,
    name: str | None = None,
    host: str = LOOPBACK,
    more_env: tuple[tuple[str, str], ...] = (),
) -> tuple[str, ...]:
    """The whole command for one container of `invocation.containers`.

    The model is mounted read-only where it lies, so that the plan's paths hold inside. ``more_env`` are variables
    beside the plan's, such as those that keep the server offline.
    """
    program, *rest = contained(processes, host=host)
    env = {**variables(plan, processes[-1]), **dict(more_env)}
    return (
        "docker",
        "run",
        "--rm",
        *([] if name is None else [f"--name={name}"]),
        *(f"{option}={value}" for option, value in options(plan)),
        *(f"--volume={path}:{path}:ro" for path in mounted(plan)),
        *(f"--env={variable}={value}" for variable, value in env.items()),
        f"--entrypoint={program}",
        image_of(plan, image),
        *rest,
    )
