"""A cluster that is there already: its address, from what a person gave to ``--on``, and our place in it.

>>> address_of("ray://head", {})
'ray://head:10001'
>>> address_of("ray", {"RAY_ADDRESS": "10.0.0.1:6379"})
'10.0.0.1:6379'

Nothing is started, and what we ran there ends with the connection. Ray is not told to ship anything: neither our code
(every node has the same installation, see `nodes`) nor our environment. A worker's environment is that of whoever
started Ray on its node. A cluster that asks for a token gets the one of RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH, which
Ray reads itself.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from pipeline.base.errors import UserError, first_line, last_line

VARIABLE = "RAY_ADDRESS"
HERE = "auto"
"""Ray's own word for the cluster that this machine is a node of."""
CLIENT_PORT = 10001
"""Where Ray's head serves clients unless told otherwise (``ray start --ray-client-server-port``)."""
_PROBE_S = 5.0
_HINT = "On the head: `ray start --head`; on the others: `ray start --address=HEAD:6379`. Then the same command."


def address_of(on: str, environment: Mapping[str, str]) -> str:
    """What `ray.init` takes: ``ray`` is the cluster of `VARIABLE`, else of this machine.

    Raises `UserError` for anything that is no address of a cluster.
    """
    if on == "ray":
        given = environment.get(VARIABLE, "")
        if given.startswith(("http://", "https://")):
            raise UserError(
                f"{VARIABLE}: found {given}, where Ray takes jobs, expected HEAD:6379 or ray://HEAD:{CLIENT_PORT}."
            )
        return _client(given, VARIABLE) if given.startswith("ray://") else given or HERE
    return _client(on, "--on")


def jobs_address_of(on: str, environment: Mapping[str, str]) -> str:
    """What `quantmint submit --ray` takes: ``ray`` is the same cluster as for `address_of`, which Ray's client of jobs
    finds by itself; else its dashboard, ``http://HEAD:8265``.

    Raises `UserError` for anything else, also for the address of Ray's client: jobs go to the dashboard.
    """
    given, name = (environment.get(VARIABLE, ""), VARIABLE) if on == "ray" else (on, "--on")
    if given.startswith("ray://"):
        raise UserError(
            f"{name}: found {given}, the address of Ray's client, and jobs go to the dashboard",
            hint="--on http://HEAD:8265 where nothing else was set.",
        )
    if on == "ray":
        return HERE
    try:
        parts = urlsplit(on)
        sound = parts.scheme in {"http", "https"} and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise UserError(
            f"--on: found {on!r}, expected ray ({VARIABLE}'s cluster or this machine's) or http://HEAD:8265"
        )
    return on


def endpoint_of(address: str) -> tuple[str, int] | None:
    """Host and port that must be open; None for the cluster of this machine, which Ray finds."""
    if address == HERE:
        return None
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise UserError(f"{VARIABLE}: found {address!r}, expected HOST:PORT or ray://HOST:PORT.")
    return host, port


def _client(text: str, name: str) -> str:
    parts = urlsplit(text)
    try:
        sound = parts.scheme == "ray" and parts.hostname and not parts.path.strip("/") and not parts.query
        port = parts.port or CLIENT_PORT
    except ValueError:
        sound, port = False, 0
    if not sound:
        raise UserError(f"{name}: found {text!r}, expected ray (this machine's cluster), or ray://HEAD[:PORT].")
    return f"ray://{parts.netloc.rpartition('@')[2].removesuffix(f':{port}')}:{port}"


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
    except ConnectionAbortedError as error:  # with a traceback of the head's
        raise UserError(
            f"{_named(address)} is there, but serves nobody: {last_line(error)}",
            hint="A busy head may do so later.",
            transient=True,
        ) from None
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"no Ray cluster answers at {_named(address)}: {first_line(error)}", hint=_HINT) from None


def disconnect() -> None:
    """Leave; the cluster ends our tasks and the processes that ran them."""
    import ray

    ray.shutdown()


def warning_of(address: str, environment: Mapping[str, str]) -> str | None:
    """What a person should know of a cluster that asks nobody for a token; None where there is nothing to say."""
    endpoint = endpoint_of(address)
    if endpoint is None or environment.get("RAY_AUTH_MODE") == "token" or _is_loopback(endpoint[0]):
        return None
    return (
        f"whoever reaches {endpoint[0]} over the network can run code through Ray; keep it private, or set "
        "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH on every machine"
    )


def _require_open(address: str) -> None:
    endpoint = endpoint_of(address)
    if endpoint is None:
        return
    try:  # Ray itself tries for a minute
        socket.create_connection(endpoint, timeout=_PROBE_S).close()
    except OSError as error:
        raise UserError(f"no Ray cluster answers at {_named(address)}: {error}.", hint=_HINT) from None


def _named(address: str) -> str:
    return "this machine" if address == HERE else address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def secrets_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of variables that no part of a stage has any use for."""
    from pipeline.base.processes import child_environment

    # An address of a webhook is as good as a key.
    return tuple(name for name in environment if "WEBHOOK" in name or name not in child_environment({}, {name: ""}))


def forget_secrets() -> None:
    """In a worker: drop what the shell that started Ray had; a model's own code may run here."""
    for name in secrets_in(os.environ):
        del os.environ[name]
