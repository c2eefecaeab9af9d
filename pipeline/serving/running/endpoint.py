"""Takes a server that already runs: looks whether it is the right one, and never stops it.

::

    with EndpointLauncher("https://gpu7:8000", api_key_variable="GPU7_KEY").deploy(plan, (), folder) as running: ...

The key is read from a variable at every request and goes into the header of that request, nowhere else. HTTP tells a
name, a folder, a length and a version, never the weights: on this machine the folder is proof; elsewhere a server can
be shown to be the wrong one, never the right.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.base.errors import ServingError, UserError
from pipeline.serving.environment import parse_version
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.deployment import Deployment, Say
from pipeline.serving.running.server import Server, fetch

_WATCH_S = 5.0
_MISSES = 3  # a busy server may let one question wait
_LOADING_S = 2.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class EndpointLauncher:
    """``strict`` makes an error of what is otherwise a warning: a checkpoint that cannot be proven, another setting."""

    def __init__(self, url: str, *, api_key_variable: str | None = None, strict: bool = False) -> None:
        self.url = endpoint_url(url)
        self.api_key_variable = _variable(api_key_variable)
        self.strict = strict

    @contextmanager
    def deploy(
        self,
        plan: LaunchPlan,
        processes: Sequence[Process],
        logs: Path,
        *,
        startup_timeout: float = 3600.0,
        say: Say = print,
    ) -> Iterator[Deployment]:
        """The server while the block runs; ``processes`` and ``logs`` have no part in it.

        One that is still loading (503) is waited for. Raises ServingError where nobody answers, or another model does.
        """
        if self.api_key_variable is not None and self.url.startswith("http:") and not _is_local(self.url):
            say(f"warning: {self.url} is not https: the key in {self.api_key_variable} travels readable")
        waited = self._wait(startup_timeout)
        asked = Server(plan.served_model_name, self.url, None, waited, api_key_variable=self.api_key_variable)
        server = _served(asked, plan)
        doubts = list(_doubts(server, plan))
        if doubts and self.strict:
            raise ServingError(f"{self.url} cannot be taken: {'; '.join(doubts)}", hint="Without --strict it is taken.")
        for doubt in doubts:
            say(f"warning: {self.url}: {doubt}")
        yield _Attached(server)

    def _wait(self, timeout: float) -> float:
        """Seconds until /health says 200."""
        began = time.monotonic()
        key = None if self.api_key_variable is None else os.environ[self.api_key_variable]
        while True:
            try:
                status, _ = fetch(self.url, "/health", timeout=30, key=key)
            except (OSError, http.client.HTTPException) as error:
                raise ServingError(f"nobody answers at {self.url}: {error}", transient=True) from error
            if status == 200:
                return time.monotonic() - began
            if status != 503 or time.monotonic() - began > timeout:
                hint = "Name the key's variable." if status in {401, 403} else None
                raise ServingError(
                    f"{self.url} answers /health with {status}, expected 200", hint=hint, transient=status >= 500
                )
            time.sleep(_LOADING_S)


class _Attached(Deployment):
    """A server of somebody else: there is no process to look at, so it is asked."""

    def __init__(self, server: Server) -> None:
        super().__init__([server], [])

    def check(self) -> None:
        """Raise `ServingError` when it does not answer."""
        self.servers[0].get("/health")

    def watch(self) -> None:
        """Block until it leaves several questions in a row without an answer."""
        missed = 0
        while True:
            try:
                self.check()
                missed = 0
            except ServingError:
                missed += 1
                if missed == _MISSES:
                    raise
            time.sleep(_WATCH_S)


def endpoint_url(text: str) -> str:
    """An address without the API's path: "http://gpu7:8000/v1/" is "http://gpu7:8000". UserError for another thing."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"{text!r} is not the address of a server: expected something like http://gpu7:8000")
    if parts.username is not None or parts.password is not None:
        raise UserError("the address holds a name or password", hint="Put a key into a variable and name that one.")
    if parts.query or parts.fragment:
        raise UserError(f"{text!r} has more than an address: leave out what follows {'?' if parts.query else '#'}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _variable(name: str | None) -> str | None:
    """The name of a variable that is set; what looks like the key itself is not repeated."""
    if name is None:
        return None
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise UserError("expected the name of a variable that holds the key, got something else")
    if not os.environ.get(name):
        hint = None if name.isupper() else "If that was the key itself, it stands in your shell's history now."
        raise UserError(f"the variable {name if name.isupper() else 'of the key'} is not set", hint=hint)
    return name


def _is_local(url: str) -> bool:
    """Whether the files of a server there are ours."""
    return urlsplit(url).hostname in _LOOPBACK


def _card(server: Server, plan: LaunchPlan) -> Mapping[str, Any]:
    """What the server says of our model, by its name, else by its folder. ServingError where it has none."""
    try:
        models = [dict(model) for model in json.loads(server.get("/v1/models"))["data"]]
        ours = [model for model in models if model["id"] == server.model_name]
        ours += [model for model in models if model.get("root") == plan.model]
    except (ValueError, KeyError, TypeError) as error:
        raise ServingError(f"{server.base_url} does not list its models as vLLM does: {error}") from error
    if not ours:
        names = ", ".join(str(model["id"]) for model in models) or "nothing"
        raise _another(server, f"it serves {names}, expected {plan.served_model_name}")
    return ours[0]


def _served(server: Server, plan: LaunchPlan) -> Server:
    """The server by the name that it gives our model. ServingError where it cannot be the one of the plan."""
    card = _card(server, plan)
    root, length, needed = card.get("root"), card.get("max_model_len"), plan.option("--max-model-len")
    seen = root is not None and _is_local(server.base_url) and Path(root).is_dir()
    if seen and not (Path(plan.model).is_dir() and Path(str(root)).samefile(plan.model)):
        raise _another(server, f"it serves {root}, expected {plan.model}")
    if isinstance(length, int) and needed is not None and needed.isdigit() and length < int(needed):
        raise _another(server, f"it takes {length:,} tokens a request, the plan needs {int(needed):,}")
    return replace(server, model_name=str(card["id"]))


def _another(server: Server, why: str) -> ServingError:
    return ServingError(f"{server.base_url} is not the server of this plan: {why}")


def _doubts(server: Server, plan: LaunchPlan) -> Iterator[str]:
    """What cannot be proven of a server that may be the right one, and what is otherwise than planned."""
    root = _card(server, plan).get("root")
    if root is None:
        yield "it does not say which folder it serves"
    elif not _is_local(server.base_url) or not Path(root).is_dir():
        yield f"it serves {root} on a machine whose files cannot be seen from here"
    version = server.version()
    if plan.vllm_version and parse_version(version) != parse_version(plan.vllm_version):
        yield f"it is vLLM {version}, the plan was made for {plan.vllm_version}"
    # The label says "auto" also where the checkpoint brought FP8, so that word proves nothing.
    said, planned = server.cache_config().get("cache_dtype", "auto"), plan.option("--kv-cache-dtype") or "auto"
    if said != "auto" and said[:3] != planned[:3]:
        yield f"its KV cache is {said}, the plan's {planned}"
