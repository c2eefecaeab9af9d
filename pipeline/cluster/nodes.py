"""The nodes of a cluster, and what a task asks of one: a GPU, or cores.

Ray places tasks by what it was told that a node has, so nothing here chooses a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import UserError

CORES_A_SHARD = 8
"""More would wait for each other: a file's hash takes its bytes in their order, about as fast as so many make them."""
_ACCELERATOR = "accelerator_type:"


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


def kinds(nodes: Sequence[Node], ask: Ask, processors: Mapping[str, str]) -> Counter[str]:
    """How many there are of each kind of GPU, or of CPU, that computes; ``processors`` are the CPUs' names by node."""
    found: Counter[str] = Counter()
    for node in nodes:
        if ask.slots(node):
            found[(node.accelerator or "GPU") if ask.gpus else processors[node.id]] += node.gpus if ask.gpus else 1
    return found


def named(kinds: Mapping[str, int]) -> str:
    """`kinds` for people."""
    return ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in kinds.items())
