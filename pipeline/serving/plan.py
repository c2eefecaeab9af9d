"""A launch plan of vLLM: arguments, variables, layout, memory and requirements of the machine; and its processes.

`planner.py` makes plans, `processes` expands a plan into the processes to start, `render` prints it in other forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.planning.target import parse_target


class Reason(NamedTuple):
    """The value of a knob with its reason and source."""

    knob: str
    value: str
    why: str
    source: str


class HostCheck(NamedTuple):
    """A requirement that a launch has of the machine; `quantmint doctor` checks it under the same ``name``."""

    name: str
    expected: str
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The parallelism of a launch.

    One server holds ``data`` engines of ``tensor`` x ``pipeline`` accelerators and spans ``nodes``; ``packed`` servers
    share one accelerator. ``expert`` spreads whole experts over a server's accelerators instead of slices of each.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    replicas: int = 1
    packed: int = 1
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """Number of accelerators of one server."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a server's fullest accelerator in bytes, by part; on a CPU, of the process.

    ``total`` is the accelerator's memory, ``budget`` the share that vLLM may take, ``kv_cache`` the rest of the budget
    after weights, activations and graphs. ``kv_tokens`` is the capacity of one engine's cache in tokens,
    ``concurrency`` in requests of full length. ``beside`` is memory outside the budget: the buffers of Quick Reduce.
    """

    total: int
    budget: int
    weights: int
    activations: int
    graphs: int
    kv_cache: int
    kv_bytes_per_token: int
    kv_tokens: int
    concurrency: float
    beside: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a launch. ``port`` is None for a headless engine, which answers no requests.

    ``gpus`` are positions in the list of GPUs that the launch may use; ``env`` selects them for the runtime.
    """

    node: int
    role: Literal["server", "headless"]
    replica: int
    gpus: tuple[int, ...]
    port: int | None
    env: Mapping[str, str]
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A planned launch: ``argv`` starts with ("vllm", "serve", MODEL) and names neither host nor port.

    For the reference runtime ``argv`` starts with ("python", "-mquantmint.pipeline.reference", MODEL). ``docker`` are
    options of `docker run`, ``host`` the machine's requirements. ``memory``, ``image`` and ``attention_backend`` are
    None when they are not known.
    """

    env: Mapping[str, str]
    argv: tuple[str, ...]
    served_model_name: str
    tensor_parallel_size: int
    reasons: tuple[Reason, ...]
    layout: ParallelLayout = ParallelLayout()
    memory: Memory | None = None
    host: tuple[HostCheck, ...] = ()
    warnings: tuple[str, ...] = ()
    docker: tuple[str, ...] = ()
    image: str | None = None
    attention_backend: str | None = None
    target: str = ""
    profile: str = ""
    vllm_version: str = ""

    @property
    def model(self) -> str:
        """The checkpoint's folder, or a repository."""
        return self.argv[2]

    def option(self, name: str) -> str | None:
        """Return the value of an argument, the last if repeated; "" for a flag without value, None if absent."""
        value = None
        for word, following in zip(self.argv, (*self.argv[1:], "--"), strict=True):
            if word == name:
                value = "" if following.startswith("--") else following
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
        return value

    def canonical(self) -> dict[str, Any]:
        """Return the part that determines a measurement, for its fingerprint: no model path, no prose."""
        return {"env": dict(sorted(self.env.items())), "arguments": list(self.argv[3:])}

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON values."""
        plain = ("target", "profile", "vllm_version", "served_model_name", "attention_backend", "image")
        return {
            **{name: getattr(self, name) for name in plain},
            "env": dict(self.env),
            "argv": list(self.argv),
            "tensor_parallel_size": self.tensor_parallel_size,
            "replicas": self.layout.replicas,
            "pipeline_parallel_size": self.layout.pipeline,
            "data_parallel_size": self.layout.data,
            "expert_parallel": self.layout.expert,
            "nodes": self.layout.nodes,
            "servers_per_gpu": self.layout.packed,
            "memory": None if self.memory is None else asdict(self.memory),
            "host": [check._asdict() for check in self.host],
            "docker": list(self.docker),
            "reasons": [reason._asdict() for reason in self.reasons],
            "warnings": list(self.warnings),
        }


PORT = 8000
DATA_PORT = 13345
"""Port of the first node's data parallel coordinator."""


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The GPUs that environment variables leave to a process, in the form that its own children need.

    ``names`` are entries for CUDA_VISIBLE_DEVICES, in order: numbers or UUIDs. ``env`` are variables to pass on with
    it, relative to which the numbers count. ``source`` is the setting that limits the GPUs, for messages.
    """

    names: tuple[str, ...]
    source: str
    env: Mapping[str, str] = field(default_factory=dict)


def processes(
    plan: LaunchPlan,
    *,
    port: int = PORT,
    host_ips: Sequence[str] = (),
    visible: VisibleDevices | None = None,
    node_rank: int = 0,
) -> tuple[Process, ...]:
    """Return the processes of a launch, in the order to start them.

    Servers listen on consecutive ports from ``port`` on. For a server that spans nodes, ``host_ips`` are the nodes'
    addresses on a private network, the head's first; without them the placeholders NODE_0_IP, NODE_1_IP and so on are
    used. ``visible`` are the GPUs of node ``node_rank``; other nodes, and None, use numbers from 0 on. Raises
    `UserError` for fewer addresses than nodes, and for fewer visible GPUs than a node of the plan needs.
    """
    nodes = plan.layout.nodes
    if nodes == 1:
        launched = tuple(_servers(plan, port))
    else:
        if host_ips and len(host_ips) < nodes:
            raise UserError(f"{len(host_ips)} addresses for {nodes} nodes: expected one for each")
        launched = tuple(_spanning(plan, port, host_ips[:nodes] or [f"NODE_{node}_IP" for node in range(nodes)]))
    if visible is None:
        return launched
    return tuple(_on_visible(process, visible) if process.node == node_rank else process for process in launched)


def _on_visible(process: Process, visible: VisibleDevices) -> Process:
    """Return the process on the caller's visible GPUs. Raises `UserError` when they are too few."""
    if not process.gpus:
        return process
    needed = max(process.gpus) + 1
    if needed > len(visible.names):
        raise UserError(
            f"{visible.source} leaves {len(visible.names)} GPUs, expected {needed} for this launch",
            hint=f"Make more of them visible, or plan for fewer: --target NAME:{len(visible.names) or 1}.",
        )
    names = ",".join(visible.names[position] for position in process.gpus)
    return replace(process, env={**visible.env, **process.env, "CUDA_VISIBLE_DEVICES": names})


def waves(plan: LaunchPlan, processes: Sequence[Process]) -> tuple[tuple[Process, ...], ...]:
    """Return the processes in groups: each group may load when the servers of the group before it answer.

    Servers on one accelerator are in different groups, because vLLM measures its own memory by that of the whole
    device, and would count what another server loads meanwhile (vllm#55827).
    """
    count = plan.layout.packed
    groups = (tuple(process for process in processes if process.replica % count == rank) for rank in range(count))
    return tuple(filter(None, groups))


def _servers(plan: LaunchPlan, port: int) -> Iterator[Process]:
    """Yield independent servers, node after node, each on its own accelerators or sharing one."""
    layout, target = plan.layout, parse_target(plan.target)
    per_node = max(1, target.gpus // layout.gpus)
    for number in range(layout.replicas * layout.packed):
        group = number // layout.packed
        start = group % per_node * layout.gpus
        gpus = () if target.accelerator.kind == "cpu" else tuple(range(start, start + layout.gpus))
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        yield Process(group // per_node, "server", number, gpus, port + number, env, plan.argv)


def _spanning(plan: LaunchPlan, port: int, addresses: Sequence[str]) -> Iterator[Process]:
    """Yield the processes of one server on several nodes: its data parallel engines, or its one engine."""
    layout = plan.layout
    gpus = tuple(range(layout.gpus // layout.nodes))
    local = layout.data // layout.nodes
    for node, address in enumerate(addresses):
        if layout.data > 1:
            node_argv = ["--data-parallel-size-local", str(local), "--data-parallel-address", addresses[0]]
            node_argv += ["--data-parallel-rpc-port", str(DATA_PORT)]
            node_argv += ["--data-parallel-start-rank", str(node * local)] if node else []
        else:
            # --nnodes needs "mp"; on ROCm vLLM would use Ray if a cluster runs (vLLM 0.32 config/parallel.py).
            node_argv = ["--distributed-executor-backend", "mp", "--nnodes", str(layout.nodes)]
            node_argv += ["--node-rank", str(node), "--master-addr", addresses[0]]
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "VLLM_HOST_IP": address}
        if node == 0:
            yield Process(0, "server", 0, gpus, port, env, (*plan.argv, *node_argv))
        else:
            yield Process(node, "headless", 0, gpus, None, env, (*plan.argv, *node_argv, "--headless"))
