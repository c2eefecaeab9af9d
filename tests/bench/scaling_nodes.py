"""Holds a Ray cluster until its standard input ends: ``python -m tests.bench.scaling_nodes '[[0, 1], [2, 3]]'``.

Each node gets the cores of one list, and its workers inherit them. Prints ``address HOST:PORT`` when all are there.
"""

from __future__ import annotations

import json
import os
import sys


def main(cores: list[list[int]]) -> None:
    from ray.cluster_utils import Cluster

    from tests.clusters.ray.lean import lean_nodes

    ours = os.sched_getaffinity(0)
    cluster = Cluster()
    for mine in cores:
        os.sched_setaffinity(0, mine)
        head = {} if cluster.head_node else {"include_dashboard": False}
        with lean_nodes():
            cluster.add_node(num_cpus=len(mine), object_store_memory=100 << 20, **head)
    os.sched_setaffinity(0, ours)
    try:
        print(f"address {cluster.address}", flush=True)  # noqa: T201 - what it is read for
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
