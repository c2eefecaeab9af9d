"""The processes of a launch: which accelerators, port, node and addresses each gets.

    >>> [(process.gpus, process.port) for process in processes(plan)]       # two servers on two accelerators each
    [((0, 1), 8000), ((2, 3), 8001)]

CUDA_VISIBLE_DEVICES selects accelerators, on ROCm as well; HIP_VISIBLE_DEVICES stays unset, because two that differ
raise (ROCm 2026: Tensor parallelism). A server that spans nodes is one process on each: the first answers, the others
are headless. Where one engine spans them, vLLM's own executor joins their workers (--nnodes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.base.errors import UserError
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.planning.target import parse_target

PORT = 8000
DATA_PORT = 13345
"""Where the engines of other nodes find the first one."""


def processes(
    plan: LaunchPlan, *, port: int = PORT, host_ips: Sequence[str] = (), first_gpu: int = 0
) -> tuple[Process, ...]:
    """Every process, in the order in which they start.

    Servers get the ports from ``port`` on. ``host_ips`` are the nodes' addresses on a private network, the first that
    of the head, where one server spans nodes; without them, names in capitals stand in their places. ``first_gpu`` is
    the first accelerator of each node. UserError for fewer addresses than nodes.
    """
    layout = plan.layout
    if layout.nodes > 1:
        if host_ips and len(host_ips) < layout.nodes:
            raise UserError(f"{len(host_ips)} addresses for {layout.nodes} nodes: expected one for each")
        addresses = tuple(host_ips[: layout.nodes]) or tuple(f"NODE_{node}_IP" for node in range(layout.nodes))
        return tuple(_spanning(plan, port, addresses, first_gpu))
    return tuple(_servers(plan, port, first_gpu))


def _servers(plan: LaunchPlan, port: int, first_gpu: int) -> Iterator[Process]:
    """Independent servers, node after node, each on its own accelerators or packed on one."""
    layout, target = plan.layout, parse_target(plan.target)
    per_node = max(1, target.gpus // layout.gpus)
    for number in range(layout.replicas * layout.packed):
        group = number // layout.packed
        start = first_gpu + group % per_node * layout.gpus
        gpus = () if target.accelerator.kind == "cpu" else tuple(range(start, start + layout.gpus))
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        yield Process(group // per_node, "server", number, gpus, port + number, env, plan.argv)


def _spanning(plan: LaunchPlan, port: int, addresses: Sequence[str], first_gpu: int) -> Iterator[Process]:
    """One server on several nodes: its data parallel engines, or its one engine."""
    layout = plan.layout
    here = layout.gpus // layout.nodes
    gpus = tuple(range(first_gpu, first_gpu + here))
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
