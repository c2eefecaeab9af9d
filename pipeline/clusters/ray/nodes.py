"""A cluster that is there already: our place in it, its nodes, and whether all of them would make the same bytes.

What we ran there ends with the connection. Ray is not told to ship anything: neither our code nor our environment. A
cluster that asks for a token gets the one of RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH, which Ray reads itself.

Ray places tasks by what it was told that a node has, so nothing here chooses a node. Before a node is given anything it
is asked whether it has the same code and libraries, and the same files under the same names, one of which was just
written here: two folders of one name on two disks are found, also where both are empty.
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
from quantmint.pipeline.base.machine import Machine, cpu_name, versions
from quantmint.pipeline.base.processes import child_environment
from quantmint.pipeline.quantize.engines.stream.shard import PARTIAL_SUFFIX

VARIABLE = "RAY_ADDRESS"
HERE = "auto"
"""Ray's own word for the cluster that this machine is a node of."""
CLIENT_PORT = 10001
"""Where Ray's head serves clients unless told otherwise (``ray start --ray-client-server-port``)."""
_AUTHORITY = r"(\[[\da-fA-F:]+\]|[^@/:\s]+)(?::(\d+))?/?"
_CLIENT = re.compile(f"ray://{_AUTHORITY}")
_DASHBOARD = re.compile(f"https?://{_AUTHORITY}")
_PROBE_S = 5.0
_HINT = "On the head: `ray start --head`; on the others: `ray start --address=HEAD:6379`. Then the same command."


def address_of(on: str, environment: Mapping[str, str]) -> str:
    """What `ray.init` takes: ``ray`` is `VARIABLE`'s cluster or this machine's; `UserError` for no address."""
    name, given = (VARIABLE, environment.get(VARIABLE) or HERE) if on == "ray" else ("--on", on)
    if on == "ray" and "://" not in given:
        return given
    found = _CLIENT.fullmatch(given)
    if found is None:
        raise UserError(f"{name}: found {given!r}, expected ray (this machine's cluster), or ray://HEAD[:PORT].")
    return f"ray://{found[1]}:{found[2] or CLIENT_PORT}"


def jobs_address_of(on: str | None) -> str | None:
    """What `quantmint submit --ray` takes: ``ray`` is the same cluster as for `address_of`, which Ray's client of jobs
    finds by itself; else its dashboard, ``http://HEAD:8265``, or nothing. Raises `UserError` for anything else.
    """
    if on not in (None, "ray") and _DASHBOARD.fullmatch(str(on)) is None:
        raise UserError(
            f"--on: found {on!r}, expected ray ({VARIABLE}'s cluster or this machine's) or http://HEAD:8265"
        )
    return HERE if on == "ray" else on


def connect(address: str) -> None:
    """Become a driver of the cluster. Raises `UserError` where none answers, or it does not want us."""
    import ray

    if ray.is_initialized():
        return
    named = "this machine" if address == HERE else address
    if address != HERE:  # Ray itself tries for a minute
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"{VARIABLE}: found {address!r}, expected HOST:PORT or ray://HOST:PORT.")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"no Ray cluster answers at {named}: {error}.", hint=_HINT) from None
    start = partial(ray.init, address=address, logging_level="ERROR", log_to_driver=False, configure_logging=False)
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        try:
            start()
        except ConnectionAbortedError:  # the head starts a server for each client; a busy one's fails now and then
            start()
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"{named} asks for a token: {first_line(error)}",
            hint="Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file with the cluster's token.",
        ) from None
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"no Ray cluster answers at {named}: {first_line(error)}", hint=_HINT) from None
    finally:  # our handler of SIGTERM: Ray's exits at once, with the signal as the code
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def forget_secrets() -> None:
    """In a worker: drop what the shell that started Ray had; a model's own code may run here."""
    for name in list(os.environ):
        # An address of a webhook is as good as a key.
        if "WEBHOOK" in name or name not in child_environment({}, {name: ""}):
            del os.environ[name]


CORES_A_SHARD = 8
"""More would wait for each other: a file's hash takes its bytes in their order, about as fast as so many make them."""
_ACCELERATOR = "accelerator_type:"
_SHAPING = ("quantmint", "torch", "transformers", "tokenizers", "safetensors")
_CODE = "quantmint's code"
# That shape bytes on a node.
_ROOMS = ("calibration", "pipeline/clusters/ray", "pipeline/quantize/engines", "pipeline/quantize/formats")
_PROBE = ".quantmint-probe"
_SAMPLES, _SAMPLE = 8, 4096  # places in a file, and bytes at each
_ROOT = Path(__file__).parents[3]
HINT = "Every node needs the same installation and the same folders, on a filesystem that they share."


@dataclass(frozen=True, slots=True)
class Node:
    """A node that can be given work; ``accelerator`` is Ray's name of its GPUs, empty where it has none."""

    id: str
    name: str
    cpus: int
    gpus: int
    accelerator: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one task takes of a node: CPUs or a GPU; ``device`` is PyTorch's name of what it finds there."""

    device: Literal["cpu", "cuda"]
    cpus: int
    gpus: int

    def slots(self, node: Node) -> int:
        """How many such tasks a node runs at a time."""
        return node.gpus // self.gpus if self.gpus else node.cpus // self.cpus

    def options(self) -> dict[str, Any]:
        """Ray's options of a task."""
        # A process of a GPU's task is not used again unless it is said so, and each loads PyTorch anew.
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_calls": 0}


def nodes_of(table: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """The nodes of `ray.nodes()` that are alive and have CPUs or GPUs, by name."""
    found = []
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
            found.append(node)
    return tuple(sorted(found, key=lambda node: node.name))


def ask_for(nodes: Sequence[Node], device: str, *, most_cores: int | None = None) -> Ask:
    """What a task asks for where ``device`` is "auto" (GPUs where there are any), "cpu" or "cuda".

    On CPUs as many as the smallest node has, ``most_cores`` at most: a larger node runs several. Raises `UserError`
    where no node has it.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"--device: found {device!r} with --on, expected auto, cpu or cuda: Ray says which device a task gets."
        )
    if device != "cpu" and any(node.gpus for node in nodes):
        return Ask("cuda", 0, 1)
    if device == "cuda":
        raise UserError("--device: found cuda, but no node of the cluster has told Ray of a GPU.")
    cores = [node.cpus for node in nodes if node.cpus]
    if not cores:
        raise UserError("the cluster has no node with CPUs to give.", hint="`ray status` shows what it has.")
    return Ask("cpu", min(min(cores), most_cores or min(cores)), 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a node is: versions by name, digests of folders that are read, its processor, its free host memory.

    ``unseen`` are folders in which it does not see what was written elsewhere.
    """

    versions: Mapping[str, str]
    folders: Mapping[str, str | None]
    unseen: tuple[str, ...]
    processor: str
    free: int


def facts_here(folders: Sequence[Path], probes: Sequence[Path] = ()) -> Facts:
    """What this machine is, with digests of ``folders``; ``probes`` are files that were written elsewhere."""
    known = {str(folder): _digest(folder) for folder in folders}
    unseen = tuple(str(probe.parent) for probe in probes if not probe.exists())
    return Facts(versions_here(), known, unseen, cpu_name(Machine()), free_bytes("cpu"))


@lru_cache(maxsize=1)
def versions_here() -> Mapping[str, str]:
    """Versions of what shapes bytes, by name; of our own code a digest, for a version has many commits."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return {**versions(*_SHAPING), "Python": platform.python_version(), _CODE: digest.hexdigest()}


def require_versions(
    expected: Mapping[str, str], node: str | None = None, found: Mapping[str, str] | None = None
) -> None:
    """Raise `UserError` where a node (this one, unless it is named) differs, with what differs first."""
    there = versions_here() if found is None else found
    for name, version in expected.items():
        if (other := there.get(name)) != version:
            told = "is not what it is here" if name == _CODE else f"is {other} there and {version} here"
            raise UserError(f"{node or socket.gethostname()}: {name} {told}: its bytes might be others.", hint=HINT)


def require_same(node: str, there: Facts, here: Facts) -> None:
    """Raise `UserError` for a node that differs, with what differs first."""
    require_versions(here.versions, node, there.versions)
    for folder, digest in here.folders.items():
        if (found := there.folders[folder]) != digest:
            what = "is not there" if found is None else "holds other files there"
            raise UserError(f"{node}: {folder} {what}.", hint=HINT)
    for folder in there.unseen:
        raise UserError(f"{node}: what is written to {folder} here is not seen there.", hint=HINT)


@contextmanager
def probing(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """A new file in each folder, for the time of the block; named as a partial one, which no checkpoint has."""
    probes = [folder / f"{_PROBE}-{secrets.token_hex(8)}{PARTIAL_SUFFIX}" for folder in folders]
    try:
        for probe in probes:
            probe.touch()
        yield probes
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)


def _digest(folder: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.is_file() or entry.name.startswith(_PROBE):
                continue
            size = entry.stat().st_size
            digest.update(f"{entry.name} {size}\n".encode())
            # Two models that were trained from one have the same names and sizes, and hardly a weight in common.
            with (folder / entry.name).open("rb", buffering=0) as stream:
                for place in range(_SAMPLES):
                    stream.seek(size * place // _SAMPLES)
                    digest.update(stream.read(_SAMPLE))
        digest.update((folder / "config.json").read_bytes())
    except OSError:
        return None
    return digest.hexdigest()
