"""Prints the nodes of a Ray cluster, a JSON line a second: ``python ray_nodes.py HEAD:PORT OWN_ADDRESS``.

Run by the interpreter that has Ray, which is vLLM's and not ours; so nothing of ours is imported here. Each line maps
the address of a node that is alive to its GPUs.
"""

import json
import sys
import time

import ray


def main(address: str, own: str) -> None:
    """Print until somebody ends it."""
    ray.init(address=address, _node_ip_address=own, logging_level="ERROR", log_to_driver=False)
    while True:
        alive = {node["NodeManagerAddress"]: node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]}
        print(json.dumps(alive), flush=True)  # noqa: T201 - its output is what it is for
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
