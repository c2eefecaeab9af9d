"""Looks at ports of both meanings: the one that a server listens on, and those of RDMA adapters."""

from __future__ import annotations

from pipeline.serving.host.finding import Outcome
from pipeline.serving.host.subject import Subject
from pipeline.serving.ports import listener


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
