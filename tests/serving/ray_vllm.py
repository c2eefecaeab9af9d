"""A stand-in for the ``vllm`` command of several machines: what vLLM asks of Ray is real, the model is not.

It joins the cluster that RAY_ADDRESS names, places a bundle of a machine's GPUs on each node, runs a task in each that
says where it is, writes that to ``ray.json`` in MODEL, and serves as fake_vllm.py does, the cluster kept.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=0)
def where() -> tuple[str, str | None, str | None]:
    return ray.util.get_node_ip_address(), os.environ.get("VLLM_HOST_IP"), os.environ.get("VLLM_ROCM_USE_AITER")


def main() -> None:
    model = Path(sys.argv[2])
    settings = json.loads((model / "fake.json").read_text())
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    assert ray.cluster_resources()["GPU"] == settings["nodes"] * settings["gpus"], ray.cluster_resources()
    group = placement_group([{"GPU": settings["gpus"]}] * settings["nodes"], strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    tasks = [
        where.options(
            num_gpus=settings["gpus"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(settings["nodes"])
    ]
    found = ray.get(tasks, timeout=60)
    (model / "ray.json").write_text(json.dumps({"address": os.environ["RAY_ADDRESS"], "tasks": sorted(found)}))


if __name__ == "__main__":
    main()
    runpy.run_path(os.environ["PATH"].split(":")[0] + "/fake_vllm.py", run_name="__main__")
