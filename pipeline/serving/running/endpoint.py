"""Attach to a server that runs already, after checking that it serves the plan's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.running.dialect import VLLM, Dialect
from quantmint.pipeline.serving.running.server import Deployment, Notify, RunningServer


class EndpointLauncher:
    """Attaches to a running server: checks that it serves the plan's model, and never stops it.

    Over HTTP a server reports a name, a folder and a version, but not its weights. On this machine the folder proves
    the model; a remote server can only be shown to serve a different model, and a warning says so.
    """

    def __init__(self, url: str, dialect: Dialect = VLLM) -> None:
        self.url = endpoint_url(url)
        self.dialect = dialect

    @contextmanager
    def deploy(self, plan: LaunchPlan, *_: object, notify: Notify = print, **__: object) -> Iterator[Deployment]:
        """Yield the server; the plan's processes, logs and timeout are ignored.

        Raises as `attach`.
        """
        yield _Attached([self.attach(plan, notify)], [])

    def attach(self, plan: LaunchPlan, notify: Notify = print) -> RunningServer:
        """Return the server, under its own name for the plan's model.

        Raises `ServingError` when no server answers, it is another runtime, or it serves another model.
        """
        server = RunningServer(plan.served_model_name, self.url, None, 0.0, dialect=self.dialect)
        server.get("/health")
        return replace(server, model_name=_model_name(server, plan, notify))


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
    models = server.dialect.models(server)
    ours = [model for model in models if model.name == server.model_name]
    ours += [model for model in models if model.folder == plan.model]
    mismatch = f"{server.base_url} is not the server of this plan"
    if not ours:
        names = ", ".join(model.name for model in models) or "nothing"
        raise ServingError(f"{mismatch}: it serves {names}, expected {plan.served_model_name}")
    root, version = ours[0].folder, server.version()
    if root is None or not is_local(server.base_url) or not Path(root).is_dir():
        folder = root or "a folder that it does not name"
        notify(f"warning: {server.base_url}: it serves {folder}, whose files cannot be checked from this machine")
    elif not (Path(plan.model).is_dir() and Path(root).samefile(plan.model)):
        raise ServingError(f"{mismatch}: it serves {root}, expected {plan.model}")
    title, planned = server.dialect.title, server.dialect.planned_version(plan)
    if planned and parse_version(version) != parse_version(planned):
        notify(f"warning: {server.base_url}: it runs {title} {version}, but the plan was made for {planned}")
    length = plan.option("--context-length")
    if length is not None and ours[0].longest is not None and ours[0].longest < int(length):
        raise ServingError(f"{mismatch}: it takes {ours[0].longest} tokens, expected {length} (--context-length)")
    return ours[0].name


def is_local(url: str) -> bool:
    """Return whether an address is on this machine's loopback interface."""
    return urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The servers of both sides that run already: ``addresses`` by side, the ``version`` that both have.

    ``settings`` are those of each side's server that change answers, as it tells them: part of a fingerprint.
    """

    addresses: Mapping[str, str]
    version: str
    dialect: Dialect
    settings: Mapping[str, Sequence[str]]


def open_endpoints(texts: Sequence[str], dialect: Dialect) -> Endpoints:
    """Return the servers that ``SIDE=URL`` texts name, after asking each for its runtime and version.

    Raises `UserError` for a text in another form or a side without a server, `ServingError` where one does not answer,
    is another runtime, or has another version than the other.
    """
    addresses: dict[str, str] = {}
    for text in texts:
        side, equals, url = text.partition("=")
        if side not in _SIDES or not equals or side in addresses:
            shown = f"a second {side}" if side in addresses else repr(text)
            raise UserError(f"--endpoint: found {shown}, expected baseline=URL and candidate=URL")
        addresses[side] = endpoint_url(url)
    absent = [side for side in _SIDES if side not in addresses]
    if absent:
        raise UserError(
            f"--launcher endpoint: found no --endpoint {absent[0]}=URL, expected the addresses of both servers"
        )
    versions: dict[str, str] = {}
    settings: dict[str, Sequence[str]] = {}
    for side, url in addresses.items():
        server = RunningServer("", url, None, 0.0, dialect=dialect)
        dialect.models(server)
        versions[side] = server.version()
        settings[side] = (*dialect.arguments(server), "--kv-cache-dtype", str(dialect.kv_cache_dtype(server)))
    if len(set(versions.values())) > 1:
        sides = ", ".join(f"{version} for the {side}" for side, version in versions.items())
        raise ServingError(f"--endpoint: found {dialect.title} {sides}, expected one version on both sides")
    return Endpoints(addresses, versions["baseline"], dialect, settings)


_SIDES = ("baseline", "candidate")
