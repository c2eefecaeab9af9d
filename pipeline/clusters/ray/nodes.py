"""The nodes of a running Ray cluster: connect, list them, and refuse those that would not make the same bytes.

Ray schedules tasks by the resources of its nodes; nothing here picks a node. Ray ships neither our code nor our
environment. So each node must have the same code, libraries and files, and must see a probe file that was just
written here: equal folder names on two disks do not pass. Ray itself reads RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from quantmint.calibration.room import free_bytes
from quantmint.pipeline.base.errors import UserError, first_line
from quantmint.pipeline.base.machine import Host, cpu_name, versions
from quantmint.pipeline.base.processes import child_environment
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX

VARIABLE = "RAY_ADDRESS"
LOCAL_CLUSTER = "auto"
"""Ray's own word for the cluster that this machine is a node of."""
CLIENT_PORT = 10001
"""Default of ``ray start --ray-client-server-port``."""
CORES_PER_SHARD = 8
"""Cores of a task that writes a shard. Hashing reads a file's bytes in order and keeps about eight cores busy."""
SAME_NODES_HINT = "Every node needs the same installation and the same folders, on a filesystem that they share."
HOST_PORT = r"(\[[\da-fA-F:]+\]|[^@/:\s]+)(?::(\d+))?/?"
_CLIENT = re.compile(f"ray://{HOST_PORT}")
_CONNECT_S = 5.0
_START_HINT = "On the head: `ray start --head`; on the others: `ray start --address=HEAD:6379`. Then the same command."
_ACCELERATOR = "accelerator_type:"
_LIBRARIES = ("quantmint", "torch", "transformers", "tokenizers", "safetensors")
_CODE = "quantmint's code"
_CODE_FOLDERS = ("calibration", "pipeline/clusters/ray", "pipeline/quantize/engines", "pipeline/quantize/formats")
_ROOT = Path(__file__).parents[3]
_PROBE = ".quantmint-probe"
_SAMPLES, _SAMPLE_BYTES = 8, 4096  # per file


def ray_address(on: str, environment: Mapping[str, str]) -> str:
    """Return the address for `ray.init` from the option ``--on``.

    ``ray`` stands for $RAY_ADDRESS, or without it for this machine's cluster; ``ray://HEAD[:PORT]`` gets the default
    port. Raises `UserError` for anything else.
    """
    option, address = (VARIABLE, environment.get(VARIABLE) or LOCAL_CLUSTER) if on == "ray" else ("--on", on)
    if on == "ray" and "://" not in address:
        return address
    match = _CLIENT.fullmatch(address)
    if match is None:
        raise UserError(f"{option}: found {address!r}, expected ray (this machine's cluster), or ray://HEAD[:PORT].")
    return f"ray://{match[1]}:{match[2] or CLIENT_PORT}"


def connect(address: str) -> None:
    """Make this process a driver of the cluster. Raises `UserError` when no cluster answers or it refuses the token."""
    import ray

    if ray.is_initialized():
        return
    name = "this machine" if address == LOCAL_CLUSTER else address
    if address != LOCAL_CLUSTER:  # Ray itself tries for a minute
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"{VARIABLE}: found {address!r}, expected HOST:PORT or ray://HOST:PORT.")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"no Ray cluster answers at {name}: {error}.", hint=_START_HINT) from None
    start = partial(ray.init, address=address, logging_level="ERROR", log_to_driver=False, configure_logging=False)
    handler: Any = signal.getsignal(signal.SIGTERM)
    try:
        try:
            start()
        except ConnectionAbortedError:  # the head starts a server for each client; on a busy head that sometimes fails
            start()
    except ray.exceptions.AuthenticationError as error:
        hint = "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file with the cluster's token."
        raise UserError(f"{name} asks for a token: {first_line(error)}", hint=hint) from None
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"no Ray cluster answers at {name}: {first_line(error)}", hint=_START_HINT) from None
    finally:  # restore our SIGTERM handler; Ray's exits at once
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def drop_secrets() -> None:
    """Delete secret variables from a worker's environment: it has those of the shell that started Ray."""
    for name in list(os.environ):
        # A webhook's address is as good as a key.
        if "WEBHOOK" in name or name not in child_environment({}, {name: ""}):
            del os.environ[name]


@dataclass(frozen=True, slots=True)
class Node:
    """A node with CPUs or GPUs; ``accelerator`` is Ray's name of its GPUs, empty without GPUs."""

    id: str
    name: str
    cpus: int
    gpus: int
    accelerator: str = ""


@dataclass(frozen=True, slots=True)
class TaskResources:
    """CPUs or one GPU that a task reserves; ``device`` is PyTorch's name of it inside the task."""

    device: Literal["cpu", "cuda"]
    cpus: int
    gpus: int

    def slots(self, node: Node) -> int:
        """Return how many such tasks the node runs at the same time."""
        return node.gpus // self.gpus if self.gpus else node.cpus // self.cpus

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `ray.remote` that reserve these resources."""
        # max_calls=0: by default Ray ends a GPU worker after each task, and every new one imports PyTorch again.
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_calls": 0}


def parse_nodes(table: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Return the nodes of `ray.nodes()` that are alive and have CPUs or GPUs, sorted by name."""
    nodes = []
    for entry in table:
        resources = entry.get("Resources", {})
        node = Node(
            entry["NodeID"],
            f"{entry['NodeManagerHostname']} ({entry['NodeManagerAddress']}, node {entry['NodeID'][:8]})",
            int(resources.get("CPU", 0)),
            int(resources.get("GPU", 0)),
            next((name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)), ""),
        )
        if entry["Alive"] and (node.cpus or node.gpus):
            nodes.append(node)
    return tuple(sorted(nodes, key=lambda node: node.name))


def task_resources(nodes: Sequence[Node], device: str, *, max_cores: int | None = None) -> TaskResources:
    """Return the resources of a task on ``device``: "auto" (a GPU if any node has one), "cpu" or "cuda".

    A CPU task takes all cores of the smallest node, at most ``max_cores``; a larger node runs several. Raises
    `UserError` when no node has such resources.
    """
    if device not in ("auto", "cpu", "cuda"):
        expected = "auto, cpu or cuda: Ray says which device a task gets."
        raise UserError(f"--device: found {device!r} with --on, expected {expected}")
    if device != "cpu" and any(node.gpus for node in nodes):
        return TaskResources("cuda", 0, 1)
    if device == "cuda":
        raise UserError("--device: found cuda, but no node of the cluster has a GPU.")
    cores = [node.cpus for node in nodes if node.cpus]
    if not cores:
        raise UserError("the cluster has no node with CPUs.", hint="`ray status` shows what it has.")
    return TaskResources("cpu", min(min(cores), max_cores or min(cores)), 0)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node's library versions, folder digests (None for an absent folder), processor and free host memory in bytes.

    ``unshared`` are folders in which the node does not see the probe file that another node wrote.
    """

    versions: Mapping[str, str]
    folders: Mapping[str, str | None]
    unshared: tuple[str, ...]
    processor: str
    free: int


def local_facts(folders: Sequence[Path], probes: Sequence[Path] = ()) -> NodeFacts:
    """Return the facts of this machine, with digests of ``folders``; ``probes`` are files that another node wrote."""
    digests = {str(folder): _digest(folder) for folder in folders}
    unshared = tuple(str(probe.parent) for probe in probes if not probe.exists())
    return NodeFacts(local_versions(), digests, unshared, cpu_name(Host()), free_bytes("cpu"))


@lru_cache(maxsize=1)
def local_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the libraries that shape bytes, by name, with a digest of our own code."""
    digest = hashlib.sha256()
    for folder in _CODE_FOLDERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return {**versions(*_LIBRARIES), "Python": platform.python_version(), _CODE: digest.hexdigest()}


def require_versions(node: str, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise `UserError` for the first of the driver's versions (``here``) that differs on the node called ``node``."""
    for name, version in here.items():
        if there.get(name) != version:
            difference = "is not what it is here" if name == _CODE else f"is {there.get(name)} there and {version} here"
            raise UserError(f"{node}: {name} {difference}: its checkpoint might differ.", hint=SAME_NODES_HINT)


def require_same(node: str, there: NodeFacts, here: NodeFacts) -> None:
    """Raise `UserError` for the first fact by which the node called ``node`` differs from this machine.

    Versions and digests of folders are compared; a folder in which the node does not see a probe file counts too.
    """
    require_versions(node, there.versions, here.versions)
    for folder, digest in here.folders.items():
        if there.folders[folder] != digest:
            difference = "is not there" if there.folders[folder] is None else "holds other files there"
            raise UserError(f"{node}: {folder} {difference}.", hint=SAME_NODES_HINT)
    for folder in there.unshared:
        raise UserError(f"{node} does not see files that are written to {folder} here.", hint=SAME_NODES_HINT)


@contextmanager
def probe_files(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """Create a new empty file in each folder and delete it after the block; its suffix keeps it out of checkpoints."""
    probes = [folder / f"{_PROBE}-{secrets.token_hex(8)}{PARTIAL_SUFFIX}" for folder in folders]
    try:
        for probe in probes:
            probe.touch()
        yield probes
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)


def _digest(folder: Path) -> str | None:
    """Return a SHA-256 over names, sizes and samples of the folder's files, or None when it cannot be read."""
    digest = hashlib.sha256()
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.is_file() or entry.name.startswith(_PROBE):
                continue
            size = entry.stat().st_size
            digest.update(f"{entry.name} {size}\n".encode())
            # Two fine-tunes of one model have equal names and sizes, and hardly a weight in common.
            with (folder / entry.name).open("rb", buffering=0) as stream:
                for sample in range(_SAMPLES):
                    stream.seek(size * sample // _SAMPLES)
                    digest.update(stream.read(_SAMPLE_BYTES))
        digest.update((folder / "config.json").read_bytes())
    except OSError:
        return None
    return digest.hexdigest()
