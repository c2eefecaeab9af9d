"""Looks at what connects: the port that a server listens on, RDMA adapters, and the Ray cluster of several nodes."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.serving.host.finding import Outcome
from pipeline.serving.host.subject import Subject
from pipeline.serving.running.ports import listener


def port(subject: Subject) -> Outcome:
    """A server could listen there."""
    values = {"port": subject.port}
    if subject.port is None:
        return Outcome("skipped", "no --port was given", values)
    reason = subject.machine.binds(subject.port)
    if reason is None:
        return Outcome("ok", f"{subject.port} is free", values)
    holder = listener(subject.port, proc=subject.machine.path("proc"))
    why = f"is not free: {reason}" if holder is None else f"is held by {holder}"
    return Outcome("fail", f"{subject.port} {why}", values)


def rdma(subject: Subject) -> Outcome:
    """Adapters whose ports are up: what ibstat shows, from the files that it reads."""
    machine = subject.machine
    if subject.target.nodes == 1:
        return Outcome("skipped", "one node needs no RDMA")
    ports = machine.glob("sys/class/infiniband/*/ports/*")
    if not ports:
        return Outcome("warn", "no RDMA adapter")
    # "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"
    up = [
        place
        for place in ports
        if "ACTIVE" in (machine.text(place / "state") or "") and "LinkUp" in (machine.text(place / "phys_state") or "")
    ]
    down = [f"{place.parent.parent.name} port {place.name}" for place in ports if place not in up]
    rates = sorted({rate for place in up if (rate := machine.text(place / "rate"))})
    found = f"{len(up)} of {len(ports)} ports active" + (f", {', '.join(rates)}" if rates else "")
    if down:
        found += f"; down: {', '.join(down[:4])}" + (" ..." if len(down) > 4 else "")
    return Outcome("ok" if up and not down else "warn", found)


def ray(subject: Subject) -> Outcome:
    """The cluster that runs, if one does: the launcher starts its own where none was started by hand."""
    nodes = subject.target.nodes
    values = {"nodes": nodes, "fix": "`quantmint serve` starts the head; start `ray` on the other nodes as it says"}
    if nodes == 1:
        return Outcome("skipped", "one node needs no cluster", values)
    if subject.installed is None:
        return Outcome("skipped", "there is no serving environment", values)
    command = Path(subject.installed.python).with_name("ray")
    if "ray" not in subject.installed.versions:
        fix = f"{subject.installed.python} -m pip install ray"
        return Outcome("fail", "the serving environment has no ray", values | {"fix": fix})
    listed = subject.machine.run([str(command), "status"])
    if listed is None:
        return Outcome("warn", "no cluster runs yet", values)
    # " 1 node_4ee1..." a node that is active, or idle; then those that are pending
    alive = listed.partition("Active:")[2].partition("Pending:")[0]
    found = sum(int(count) for count in re.findall(r"^ (\d+) ", alive, re.MULTILINE))
    return Outcome("ok" if found >= nodes else "warn", f"{found} node{'s' * (found != 1)}", values)
