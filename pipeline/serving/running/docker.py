"""Starts the containers of a plan with ``docker run``, and leaves none behind.

The client runs in the foreground: its output is the server's log, its end the server's. A container is no child of the
client, so killing that does not end it; the supervisor stops and removes it by its name, also when our own end was
SIGKILL.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.processes import OFFLINE, Child, child_environment
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.docker import docker_run
from pipeline.serving.render.invocation import image_of
from pipeline.serving.running.deployment import Deployment, Say, deployed, log_of, on_node

#: How the client finds its engine. Its credentials lie in files that these name.
_CLIENT = re.compile(r"DOCKER_(HOST|CONTEXT|CONFIG|CERT_PATH|TLS_VERIFY|API_VERSION)|XDG_RUNTIME_DIR|SSH_AUTH_SOCK")


class DockerLauncher:
    """Launches the containers of this machine, ``node_rank`` of the plan.

    ``image`` overrides the plan's. ``stop_grace`` is how many seconds a container gets between SIGTERM and SIGKILL.
    """

    def __init__(self, image: str | None = None, *, node_rank: int = 0, stop_grace: float = 15.0) -> None:
        self.image = image
        self.node_rank = node_rank
        self.stop_grace = stop_grace

    @contextmanager
    def deploy(
        self,
        plan: LaunchPlan,
        processes: Sequence[Process],
        logs: Path,
        *,
        startup_timeout: float = 3600.0,
        say: Say = print,
    ) -> Iterator[Deployment]:
        """The containers while the block runs; an image that is not here is pulled, which counts as starting.

        Raises ServingError where one ends or does not answer in time; UserError where there is no docker, no model or
        no free port.
        """
        mains = on_node(plan, processes, self.node_rank)
        docker = shutil.which("docker")
        if docker is None:
            raise UserError("there is no `docker` command on PATH", hint="Install it, or take another launcher.")
        names = [f"quantmint-{os.getpid()}-{number}" for number in range(len(mains))]
        say(f"running {image_of(plan, self.image)} as {', '.join(names)}")

        def start(process: Process, port: int | None) -> Child:
            name, own = names[mains.index(process)], replace(process, port=port)
            command = docker_run(plan, own, image=self.image, name=name, more_env=tuple(sorted(OFFLINE.items())))
            passed = {name: value for name, value in os.environ.items() if _CLIENT.fullmatch(name)}
            end = [
                [docker, "stop", f"--time={self.stop_grace:.0f}", name],
                [docker, "rm", "--force", name],
            ]
            return Child(
                [docker, *command[1:]],
                child_environment(os.environ, {}) | passed,
                log_of(process, logs),
                grace=self.stop_grace,
                after=end,
            )

        with deployed(plan, mains, start, startup_timeout=startup_timeout, say=say) as running:
            yield running
