"""A container of a launch as the arguments of ``docker run``; a list, never a shell string.

    >>> docker_run(plan, containers(processes)[0])[:3]
    ('docker', 'run', '--rm')

The options are those of the guides. Two of them exclude each other: with ``--ipc=host`` a container has the host's
/dev/shm, and docker sets ``--shm-size`` aside. The host's is taken, because RCCL's ranks meet in it also across the
containers of a node; that it holds 16 GiB is what `quantmint doctor` looks at.

The network is the host's as well, so the server listens on the loopback interface like one without a container. Devices
are all passed and selected by CUDA_VISIBLE_DEVICES, so that numbers mean the same inside and outside. The container's
user is root, which needs no group to open /dev/kfd; `video` is there for images that say otherwise, `render` is not,
for docker refuses a group that the image's /etc/group does not name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.invocation import LOOPBACK, accelerator, contained, image_of, variables

_SHARED = ("--network=host", "--ipc=host")
_BY_KIND: dict[str, tuple[str, ...]] = {
    "rocm": (
        "--group-add=video",
        "--cap-add=SYS_PTRACE",
        "--security-opt=seccomp=unconfined",
        "--device=/dev/kfd",
        "--device=/dev/dri",
    ),
    "cuda": ("--gpus=all",),
    "cpu": (),
}
#: Several nodes talk over RDMA: pinned pages, and the adapters.
_RDMA = ("--cap-add=IPC_LOCK", "--ulimit=memlock=-1", "--device=/dev/infiniband")


def options(plan: LaunchPlan) -> tuple[str, ...]:
    """What the container gets from the host."""
    kind = accelerator(plan).kind
    return (*_SHARED, *_BY_KIND[kind], *(_RDMA if plan.layout.nodes > 1 and kind != "cpu" else ()))


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
        *options(plan),
        *(f"--volume={path}:{path}:ro" for path in mounted(plan)),
        *(f"--env={variable}={value}" for variable, value in env.items()),
        f"--entrypoint={program}",
        image_of(plan, image),
        *rest,
    )
