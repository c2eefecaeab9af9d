"""Where a cluster is, from what a person gave to ``--on``.

>>> address_of("ray://head", {})
'ray://head:10001'
>>> address_of("ray", {"RAY_ADDRESS": "10.0.0.1:6379"})
'10.0.0.1:6379'
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from pipeline.errors import UserError

VARIABLE = "RAY_ADDRESS"
HERE = "auto"
"""Ray's own word for the cluster that this machine is a node of."""
CLIENT_PORT = 10001
"""Where Ray's head serves clients unless told otherwise (``ray start --ray-client-server-port``)."""


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
