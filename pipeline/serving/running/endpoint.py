"""Attach to a server that runs already, after checking that it serves the plan's model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.server import Deployment, Notify, RunningServer


class EndpointLauncher:
    """Attaches to a running server: checks that it serves the plan's model, and never stops it.

    Over HTTP a server reports a name, a folder and a version, but not its weights. On this machine the folder proves
    the model; a remote server can only be shown to serve a different model, and a warning says so.
    """

    def __init__(self, url: str) -> None:
        self.url = endpoint_url(url)

    @contextmanager
    def deploy(self, plan: LaunchPlan, *_: object, notify: Notify = print, **__: object) -> Iterator[Deployment]:
        """Yield the server; the plan's processes, logs and timeout are ignored.

        Raises `ServingError` when no server answers, or it serves another model.
        """
        server = RunningServer(plan.served_model_name, self.url, None, 0.0)
        server.get("/health")
        yield _Attached([replace(server, model_name=_model_name(server, plan, notify))], [])


class _Attached(Deployment):
    """A server that quantmint did not start, in place of a process: `check` asks the server over HTTP."""

    poll_s = 5.0

    def check(self) -> None:
        """Raise `ServingError` if the server does not answer for half a minute."""
        self.servers[0].get("/health")


def endpoint_url(text: str) -> str:
    """Return an address without its API path: "http://gpu7:8000" for "http://gpu7:8000/v1/".

    Raises `UserError` for a text that is no address, or contains credentials.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UserError("--endpoint is not the address of a server: expected something like http://gpu7:8000")
    if parts.username is not None or parts.password is not None:
        raise UserError("the address contains a user name or password, which the process list would show")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _model_name(server: RunningServer, plan: LaunchPlan, notify: Notify) -> str:
    """Return the server's name for the plan's model, found by name, else by folder; warn about what is not proven.

    Raises `ServingError` when it serves another model.
    """
    try:
        models = [dict(model) for model in json.loads(server.get("/v1/models"))["data"]]
        ours = [model for model in models if model["id"] == server.model_name]
        ours += [model for model in models if model.get("root") == plan.model]
    except (ValueError, KeyError, TypeError) as error:
        raise ServingError(f"{server.base_url} does not list its models as vLLM does: {error}") from error
    mismatch = f"{server.base_url} is not the server of this plan"
    if not ours:
        names = ", ".join(str(model["id"]) for model in models) or "nothing"
        raise ServingError(f"{mismatch}: it serves {names}, expected {plan.served_model_name}")
    root, version = ours[0].get("root"), server.version()
    local = urlsplit(server.base_url).hostname in {"127.0.0.1", "localhost", "::1"}
    if root is None or not local or not Path(root).is_dir():
        folder = root or "a folder that it does not name"
        notify(f"warning: {server.base_url}: it serves {folder}, whose files cannot be checked from this machine")
    elif not (Path(plan.model).is_dir() and Path(root).samefile(plan.model)):
        raise ServingError(f"{mismatch}: it serves {root}, expected {plan.model}")
    if plan.vllm_version and parse_version(version) != parse_version(plan.vllm_version):
        notify(f"warning: {server.base_url}: it runs vLLM {version}, but the plan was made for {plan.vllm_version}")
    return str(ours[0]["id"])
