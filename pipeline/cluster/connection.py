"""Our place in a cluster that is there already: nothing is started, and what we ran there ends with the connection.

Ray is not told to ship anything: neither our code (every node has the same installation, see `sameness`) nor our
environment. A worker's environment is that of whoever started Ray on its node. A cluster that asks for a token gets the
one of RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH, which Ray reads itself.
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

from pipeline.cluster.address import HERE, endpoint_of
from pipeline.errors import UserError, first_line, last_line

_PROBE_S = 5.0
_TRIES = 3  # a head starts a server for each client, and both give up where that takes longer than half a minute
_HINT = "On the head: `ray start --head`; on the others: `ray start --address=HEAD:6379`. Then the same command."


def connect(address: str) -> None:
    """Become a driver of the cluster. Raises `UserError` where none answers, or it does not want us."""
    import ray

    if ray.is_initialized():
        return
    _require_open(address)
    try:
        with _own_signals():
            _join(address)
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


def _join(address: str) -> None:
    import ray

    for left in reversed(range(_TRIES)):
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, configure_logging=False)
            return
        except ConnectionAbortedError:
            if not left:
                raise


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
    from pipeline.serving.running.child_environment import child_environment

    # An address of a webhook is as good as a key.
    return tuple(name for name in environment if "WEBHOOK" in name or name not in child_environment({}, {name: ""}))


def forget_secrets() -> None:
    """In a worker: drop what the shell that started Ray had; a model's own code may run here."""
    for name in secrets_in(os.environ):
        del os.environ[name]
