"""Datasets of the Hub's stand-in: repositories like models, at addresses of their own, which are only read.

They are kept under ``datasets/namespace/name``, as their addresses are; `HubStandIn.put` makes them.
"""

from __future__ import annotations

from tests.hub.api import Api
from tests.hub.connection import Reply, route
from tests.hub.repository import Json


@route("GET", "/api/datasets/{repo}(?:/revision/{})?")
def info(api: Api, repo_id: str, revision: str | None) -> Json:
    return api.info(f"datasets/{repo_id}", revision) | {"id": repo_id}


@route("GET", "/api/datasets/{repo}/tree/([^/]+)(?:/(.*))?")
def tree(api: Api, repo_id: str, revision: str, folder: str | None) -> Reply:
    return api.tree(f"datasets/{repo_id}", revision, folder or "")


@route("POST", "/api/datasets/{repo}/paths-info/{}")
def paths_info(api: Api, repo_id: str, revision: str) -> Reply:
    return api.paths_info(f"datasets/{repo_id}", revision)


@route("GET", "/datasets/{repo}/resolve/([^/]+)/(.+)")
def resolve(api: Api, repo_id: str, revision: str, path: str) -> Reply:
    return api.resolve(f"datasets/{repo_id}", revision, path)
