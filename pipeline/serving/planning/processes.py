"""The processes of a launch: which accelerators, port, node and addresses each gets.

    >>> [(process.gpus, process.port) for process in processes(plan)]       # two servers on two accelerators each
    [((0, 1), 8000), ((2, 3), 8001)]

CUDA_VISIBLE_DEVICES selects accelerators, on ROCm as well; HIP_VISIBLE_DEVICES stays unset, because two that differ
raise (ROCm 2026: Tensor parallelism). Only `ray start` gets it on ROCm: Ray hands accelerators to its workers in that
variable, and they would inherit the other one (vLLM 0.33 platforms/rocm.py). An engine that spans nodes runs on Ray, as
both guides say, although vLLM has a launcher of its own since 0.11.1 (--nnodes): Ray is what they were measured with.
Data parallel engines on several nodes need none: the other nodes run theirs headless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.errors import UserError
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.planning.target import parse_target

PORT = 8000
RAY_PORT = 6379
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
        spanning = _headless if layout.data > 1 else _ray
        return tuple(spanning(plan, port, addresses, first_gpu))
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


def _headless(plan: LaunchPlan, port: int, addresses: Sequence[str], first_gpu: int) -> Iterator[Process]:
    """Data parallel engines: the first node answers, the others run theirs without a server."""
    layout = plan.layout
    here = layout.gpus // layout.nodes
    gpus = tuple(range(first_gpu, first_gpu + here))
    local = layout.data // layout.nodes
    shared = (
        *("--data-parallel-size-local", str(local), "--data-parallel-address", addresses[0]),
        *("--data-parallel-rpc-port", str(DATA_PORT)),
    )
    for node, address in enumerate(addresses):
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "VLLM_HOST_IP": address}
        if node == 0:
            yield Process(0, "server", 0, gpus, port, env, (*plan.argv, *shared))
        else:
            argv = (*plan.argv, *shared, "--data-parallel-start-rank", str(node * local), "--headless")
            yield Process(node, "headless", 0, gpus, None, env, argv)


def _ray(plan: LaunchPlan, port: int, addresses: Sequence[str], first_gpu: int) -> Iterator[Process]:
    """A Ray cluster, and the one server on its head that uses all of it."""
    here = plan.layout.gpus // plan.layout.nodes
    gpus = tuple(range(first_gpu, first_gpu + here))
    head = f"{addresses[0]}:{RAY_PORT}"
    visible = "HIP_VISIBLE_DEVICES" if parse_target(plan.target).accelerator.kind == "rocm" else "CUDA_VISIBLE_DEVICES"
    for node, address in enumerate(addresses):
        env = {visible: ",".join(map(str, gpus)), "VLLM_HOST_IP": address}
        where = ("--head", "--port", str(RAY_PORT)) if node == 0 else ("--address", head)
        argv = ("ray", "start", *where, "--node-ip-address", address, "--num-gpus", str(here), "--block")
        yield Process(node, "ray-head" if node == 0 else "ray-worker", 0, gpus, None, env, argv)
    # Ray hands accelerators out: the server's own process must see none of its own choosing.
    yield Process(0, "server", 0, gpus, port, {"VLLM_HOST_IP": addresses[0]}, plan.argv)
