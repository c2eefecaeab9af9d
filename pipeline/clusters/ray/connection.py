"""A cluster that is there already: its address, from what a person gave to ``--on``, and our place in it.

Nothing is started, and what we ran there ends with the connection. Ray is not told to ship anything: neither our code
(every node has the same installation, see `nodes`) nor our environment. A worker's environment is that of whoever
started Ray on its node. A cluster that asks for a token gets the one of RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH, which
Ray reads itself.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipeline.base.errors import UserError, first_line

VARIABLE = "RAY_ADDRESS"
HERE = "auto"
"""Ray's own word for the cluster that this machine is a node of."""
CLIENT_PORT = 10001
"""Where Ray's head serves clients unless told otherwise (``ray start --ray-client-server-port``)."""
_AUTHORITY = r"(\[[\da-fA-F:]+\]|[^@/:\s]+)(?::(\d+))?/?"
_CLIENT = re.compile(f"ray://{_AUTHORITY}")
_DASHBOARD = re.compile(f"https?://{_AUTHORITY}")
_PROBE_S = 5.0
_HINT = "On the head: `ray start --head`; on the others: `ray start --address=HEAD:6379`. Then the same command."


def address_of(on: str, environment: Mapping[str, str]) -> str:
    """What `ray.init` takes: ``ray`` is the cluster of `VARIABLE`, else of this machine.

    Raises `UserError` for anything that is no address of a cluster.
    """
    name, given = (VARIABLE, environment.get(VARIABLE) or HERE) if on == "ray" else ("--on", on)
    if on == "ray" and "://" not in given:
        return given
    found = _CLIENT.fullmatch(given)
    if found is None:
        raise UserError(f"{name}: found {given!r}, expected ray (this machine's cluster), or ray://HEAD[:PORT].")
    return f"ray://{found[1]}:{found[2] or CLIENT_PORT}"


def jobs_address_of(on: str) -> str:
    """What `quantmint submit --ray` takes: ``ray`` is the same cluster as for `address_of`, which Ray's client of jobs
    finds by itself; else its dashboard, ``http://HEAD:8265``. Raises `UserError` for anything else.
    """
    if on != "ray" and _DASHBOARD.fullmatch(on) is None:
        raise UserError(
            f"--on: found {on!r}, expected ray ({VARIABLE}'s cluster or this machine's) or http://HEAD:8265"
        )
    return HERE if on == "ray" else on


def connect(address: str) -> None:
    """Become a driver of the cluster. Raises `UserError` where none answers, or it does not want us."""
    import ray

    if ray.is_initialized():
        return
    _require_open(address)
    try:
        with _own_signals():
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, configure_logging=False)
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"{_named(address)} asks for a token: {first_line(error)}",
            hint="Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file with the cluster's token.",
        ) from None
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"no Ray cluster answers at {_named(address)}: {first_line(error)}", hint=_HINT) from None


def _require_open(address: str) -> None:
    """Ask whether something listens there at all: Ray itself tries for a minute."""
    if address == HERE:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{VARIABLE}: found {address!r}, expected HOST:PORT or ray://HOST:PORT.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at {_named(address)}: {error}.", hint=_HINT) from None


def _named(address: str) -> str:
    return "this machine" if address == HERE else address


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our handler of SIGTERM, which Ray would replace by one that exits at once, with the signal as the code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def forget_secrets() -> None:
    """In a worker: drop what the shell that started Ray had; a model's own code may run here."""
    from pipeline.base.processes import child_environment

    for name in list(os.environ):
        # An address of a webhook is as good as a key.
        if "WEBHOOK" in name or name not in child_environment({}, {name: ""}):
            del os.environ[name]
