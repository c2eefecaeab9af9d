"""What a launch of vLLM is: arguments, variables, how accelerators share it, its memory, what the machine must offer.

Plain results. `planner.py` makes a plan, `processes` the processes of its launch, `render` its other forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.planning.target import parse_target


class Reason(NamedTuple):
    """Why a knob has its value, and who says so."""

    knob: str
    value: str
    why: str
    source: str


class HostCheck(NamedTuple):
    """Something that the machine must offer for this launch; `name` is the knob's, `quantmint doctor` looks at it."""

    name: str
    expected: str
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How accelerators share the work.

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
        """Accelerators of one server."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest accelerator of a server, by part; on a CPU those of the process.

    ``total`` is the accelerator's, ``budget`` the share that vLLM may take, ``kv_cache`` what of it is left for keys
    and values, ``kv_tokens`` how many tokens that holds in one engine, ``concurrency`` requests of full length in it.
    ``beside`` is what the launch takes without vLLM counting it: the buffers of Quick Reduce.
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
    """One process of a launch. ``port`` is None where nothing is served (a headless engine).

    ``gpus`` are positions among the GPUs that the launch may use; ``env`` names them to the runtime.
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
    """What `vllm serve` gets. `argv` starts with ("vllm", "serve", MODEL) and names neither host nor port.

    That of the reference runtime starts with ("python", "-mquantmint.pipeline.reference", MODEL).
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
        """The checkpoint's folder."""
        return self.argv[2]

    def option(self, name: str) -> str | None:
        """The value of an argument, the last where it is repeated; "" for a flag that takes none, None where absent."""
        value = None
        for word, following in zip(self.argv, (*self.argv[1:], "--"), strict=True):
            if word == name:
                value = "" if following.startswith("--") else following
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
        return value

    def canonical(self) -> dict[str, Any]:
        """The part that shapes a measurement, for a fingerprint: no model path, no prose."""
        return {"env": dict(sorted(self.env.items())), "arguments": list(self.argv[3:])}

    def to_json(self) -> dict[str, Any]:
        """The whole plan as JSON values."""
        told = ("target", "profile", "vllm_version", "served_model_name", "attention_backend", "image")
        return {
            **{name: getattr(self, name) for name in told},
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
"""Where the engines of other nodes find the first one."""


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The GPUs that the variables of a process leave it, as a launch must name them to its own processes.

    ``names`` are entries for CUDA_VISIBLE_DEVICES, in order: numbers or UUIDs. ``env`` is passed on beside it, because
    the names count what it leaves. ``source`` is the setting that says so, for messages.
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
    """Return every process, in the order in which they start.

    Servers get the ports from ``port`` on. ``host_ips`` are the nodes' addresses on a private network, the first that
    of the head, where one server spans nodes; without them, names in capitals stand in their places. ``visible`` are
    the GPUs that node ``node_rank`` may use; None, and on the other nodes, numbers from 0 on. ``Process.gpus`` are
    positions in that list.
    Raises UserError for fewer addresses than nodes, and for fewer visible GPUs than a node of the plan needs.
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
    """The process on GPUs of the caller's own; UserError where they are fewer than its positions."""
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
    """The same in the order in which they may load: of servers on one accelerator each waits until the last answers.

    vLLM reads its use of memory from the whole device, and charges itself what others load meanwhile (vllm#55827).
    """
    count = plan.layout.packed
    turns = (tuple(one for one in processes if one.replica % count == turn) for turn in range(count))
    return tuple(filter(None, turns))


def _servers(plan: LaunchPlan, port: int) -> Iterator[Process]:
    """Independent servers, node after node, each on its own accelerators or packed on one."""
    layout, target = plan.layout, parse_target(plan.target)
    per_node = max(1, target.gpus // layout.gpus)
    for number in range(layout.replicas * layout.packed):
        group = number // layout.packed
        start = group % per_node * layout.gpus
        gpus = () if target.accelerator.kind == "cpu" else tuple(range(start, start + layout.gpus))
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        yield Process(group // per_node, "server", number, gpus, port + number, env, plan.argv)


def _spanning(plan: LaunchPlan, port: int, addresses: Sequence[str]) -> Iterator[Process]:
    """One server on several nodes: its data parallel engines, or its one engine."""
    layout = plan.layout
    gpus = tuple(range(layout.gpus // layout.nodes))
    local = layout.data // layout.nodes
    for node, address in enumerate(addresses):
        if layout.data > 1:
            own = ["--data-parallel-size-local", str(local), "--data-parallel-address", addresses[0]]
            own += ["--data-parallel-rpc-port", str(DATA_PORT)]
            own += ["--data-parallel-start-rank", str(node * local)] if node else []
        else:
            # --nnodes needs it, and on ROCm vLLM takes Ray where it finds a cluster (vLLM 0.32 config/parallel.py).
            own = ["--distributed-executor-backend", "mp", "--nnodes", str(layout.nodes)]
            own += ["--node-rank", str(node), "--master-addr", addresses[0]]
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "VLLM_HOST_IP": address}
        if node == 0:
            yield Process(0, "server", 0, gpus, port, env, (*plan.argv, *own))
        else:
            yield Process(node, "headless", 0, gpus, None, env, (*plan.argv, *own, "--headless"))
