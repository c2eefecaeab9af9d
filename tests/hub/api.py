"""What the Hub's stand-in answers: the part of the Hub's API that a publication and its readers use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlencode

import yaml

from tests.hub.connection import Connection, Reply, route
from tests.hub.repository import Json, Refusal, Repository, Tree, is_large, now

USER = "quant"
ORGANISATIONS = {"my-org": "admin", "read-org": "read"}
"""Whom the user belongs to, and as what."""


class Api(Connection):
    """A method for each kind of request."""

    # Who asks, and for what.

    def _token(self) -> Json | None:
        value = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if value and value not in self.server.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.server.tokens[value] if value else None

    def _may(self, right: str, name: str) -> bool:
        token, owner = self._token(), name.split("/")[0]
        if token is None:
            return False
        if token["role"] == "fineGrained":
            return any(right in token["scoped"].get(scope, []) for scope in (name, owner))
        if right == "repo.content.read":
            return owner == USER or owner in ORGANISATIONS
        return token["role"] == "write" and (owner == USER or ORGANISATIONS.get(owner) == "admin")

    def _need(self, name: str, right: str) -> None:
        if not self._may(right, name):
            raise Refusal(403, f"Forbidden: your token does not have the right {right} on {name}")

    def _repo(self, repo_id: str, right: str | None = None) -> Repository:
        """A repository that the token may see, and use in this way."""
        token, repo = self._token(), self.server.repos.get(repo_id)
        readable = any(self._may(one, repo_id) for one in ("repo.content.read", "repo.write"))
        if repo is None or (repo.private and not readable):
            # The client reads 401 as "not found" over https alone; the code says it over http too.
            raise Refusal(404 if token else 401, "Repository not found", "RepoNotFound")
        if right:
            self._need(repo_id, right)
        return repo

    @route("GET", "/api/whoami-v2")
    def whoami(self) -> Json:
        token = self._token()
        if token is None:
            raise Refusal(401, "Invalid username or password.")
        access: Json = {"displayName": "stand-in", "role": token["role"], "createdAt": now()}
        if token["role"] == "fineGrained":
            scopes = [
                {"entity": {"type": "model" if "/" in name else "org", "name": name}, "permissions": rights}
                for name, rights in token["scoped"].items()
            ]
            access["fineGrained"] = {"global": [], "scoped": scopes}
        orgs = [{"type": "org", "name": name, "roleInOrg": role} for name, role in ORGANISATIONS.items()]
        return {"type": "user", "name": USER, "orgs": orgs, "auth": {"type": "access_token", "accessToken": access}}

    # Repositories.

    @route("POST", "/api/repos/create")
    def create(self) -> Json:
        asked = self.json()
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        self._need(repo_id, "repo.write")
        url, private = f"{self.server.url}/{repo_id}", asked.get("private") or asked.get("visibility") == "private"
        if repo_id in self.server.repos:
            raise Refusal(409, "You already created this model repo", url=url)
        self.server.repos[repo_id] = Repository(repo_id, bool(private))
        return {"url": url, "name": repo_id}

    @route("PUT", "/api/models/{repo}/settings")
    def settings(self, repo_id: str) -> Json:
        repo, asked = self._repo(repo_id, "repo.write"), self.json()
        if "visibility" in asked:
            repo.private = asked["visibility"] == "private"
        repo.gated = asked.get("gated", repo.gated)
        return {"private": repo.private, "gated": repo.gated}

    @route("GET", "/api/models/{repo}(?:/revision/{})?")
    def info(self, repo_id: str, revision: str | None) -> Json:
        repo = self._repo(repo_id)
        commit = repo.find(revision or "main")
        siblings = [{"rfilename": path} for path in repo.tree(commit)]
        known = {"id": repo_id, "private": repo.private, "gated": repo.gated, "createdAt": repo.created}
        return known | {"sha": commit, "lastModified": repo.commits[commit]["date"], "siblings": siblings}

    @route("GET", "/api/models/{repo}/refs")
    def refs(self, repo_id: str) -> Json:
        found: Json = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
        kinds = {"heads": "branches", "tags": "tags", "pr": "pullRequests"}
        for ref, oid in self._repo(repo_id).refs.items():
            _, kind, name = ref.split("/", 2)
            found[kinds[kind]].append({"name": name, "ref": ref, "targetCommit": oid})
        return found

    @route("POST", "/api/models/{repo}/(branch|tag)/{}")
    def add_ref(self, repo_id: str, kind: str, name: str) -> Json:
        repo, asked = self._repo(repo_id, "repo.write"), self.json()
        start = name if kind == "tag" else asked.get("startingPoint", "main")
        ref = f"refs/tags/{asked['tag']}" if kind == "tag" else f"refs/heads/{name}"
        if ref in repo.refs:
            raise Refusal(409, f"Reference already exists: {ref}")
        repo.refs[ref] = repo.find(start)
        return {}

    @route("DELETE", "/api/models/{repo}/(branch|tag)/{}")
    def delete_ref(self, repo_id: str, kind: str, name: str) -> Json:
        ref = f"refs/{'tags' if kind == 'tag' else 'heads'}/{name}"
        if self._repo(repo_id, "repo.write").refs.pop(ref, None) is None:
            raise Refusal(404, f"No {kind} {name}", "RevisionNotFound")
        return {}

    def _page(self, entries: list[Any]) -> Reply:
        """One page, and where the next one is."""
        start = int(self.query.get("cursor", ["0"])[0])
        end, headers = start + self.server.page, {}
        if end < len(entries):
            query = urlencode({**self.query, "cursor": end}, doseq=True)
            headers["Link"] = f'<{self.server.url}{self.route}?{query}>; rel="next"'
        return Reply(200, entries[start:end], headers)

    @route("GET", "/api/models/{repo}/commits/{}")
    def commits(self, repo_id: str, revision: str) -> Reply:
        repo = self._repo(repo_id)
        return self._page(repo.history(repo.find(revision)))

    @route("GET", "/api/models/{repo}/tree/{}")
    def tree(self, repo_id: str, revision: str, folder: str = "") -> Reply:
        """All that is in a folder, however deep."""
        repo = self._repo(repo_id)
        inside = f"{folder}/" if folder else ""
        tree = {path: entry for path, entry in repo.tree(repo.find(revision)).items() if path.startswith(inside)}
        if inside and not tree:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        folders = {path.rpartition("/")[0] for path in tree if "/" in path} - {folder}
        found = [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)]
        return self._page([*found, *_listed(tree, sorted(tree))])

    @route("POST", "/api/models/{repo}/paths-info/{}")
    def paths_info(self, repo_id: str, revision: str) -> Reply:
        repo = self._repo(repo_id)
        return Reply(200, _listed(repo.tree(repo.find(revision)), parse_qs(self.body.decode())["paths"]))

    # Uploads.

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> Json:
        """The metadata of a card can be read, and names what can be a name."""
        parts = self.json()["content"].split("---", 2)
        try:
            metadata = yaml.safe_load(parts[1]) if len(parts) == 3 else None
        except yaml.YAMLError as error:
            raise Refusal(400, "Invalid metadata", errors=[{"message": str(error)}]) from None
        bases = metadata.get("base_model", []) if metadata else []
        for wrong in [bases] if isinstance(bases, str) else bases:
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", wrong):
                message = f'"base_model" with value "{wrong}" is not valid. Use a model id from https://hf.co/models.'
                raise Refusal(400, "Invalid metadata", errors=[{"message": message}])
        return {"warnings": [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]}

    @route("POST", "/api/models/{repo}/preupload/{}")
    def preupload(self, repo_id: str, revision: str) -> Json:
        repo, files = self._repo(repo_id, "repo.write"), []
        tree = repo.tree(repo.find(revision))
        for file in self.json()["files"]:
            path, there = file["path"], tree.get(file["path"])
            mode = "lfs" if is_large(path, file["size"]) else "regular"
            oid = there.get("lfs", there)["oid"] if there else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    @route("POST", "/{repo}[.]git/info/lfs/objects/batch")
    def batch(self, repo_id: str) -> Json:
        repo, objects = self._repo(repo_id, "repo.write"), []
        for one in self.json()["objects"]:
            oid, size = one["oid"], one["size"]
            objects.append({"oid": oid, "size": size})
            if oid in repo.objects:
                continue
            upload: Json = {"href": self.server.signed(f"/storage/{repo_id}/{oid}")}
            if size > self.server.part:
                numbers = range(1, -(-size // self.server.part) + 1)
                urls = {str(n): self.server.signed(f"/storage-part/{repo_id}/{oid}/{n}") for n in numbers}
                upload = {"href": f"{self.server.url}/api/complete_multipart/{repo_id}/{oid}"}
                upload["header"] = {"chunk_size": str(self.server.part), **urls}
            verify = {"href": f"{self.server.url}/{repo_id}.git/info/lfs/objects/verify"}
            objects[-1]["actions"] = {"upload": upload, "verify": verify}
        return {"transfer": "basic", "objects": objects}

    @route("POST", "/{repo}[.]git/info/lfs/objects/verify")
    def verify(self, repo_id: str) -> Json:
        asked, repo = self.json(), self._repo(repo_id, "repo.write")
        if len(repo.objects.get(asked["oid"], b"")) != asked["size"]:
            raise Refusal(404, f"No object {asked['oid']} of {asked['size']} bytes")
        return {}

    def _stored(self, repo_id: str) -> dict[str, bytes]:
        """What the storage has of a repository, for those who come with a signed link and no token."""
        if "Authorization" in self.headers:
            raise Refusal(400, "Only one auth mechanism allowed")
        if self.server.signed(self.route).partition("?signature=")[2] not in self.query.get("signature", []):
            raise Refusal(403, "SignatureDoesNotMatch")
        return self.server.repos[repo_id].objects

    @route("PUT", "/storage/{repo}/{}")
    def put(self, repo_id: str, oid: str) -> Reply:
        objects = self._stored(repo_id)
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "The provided 'x-amz-checksum-sha256' does not match what was computed.")
        objects[oid] = self.body
        return Reply(200, b"", {"ETag": f'"{oid}"'})

    @route("PUT", "/storage-part/{repo}/{}/{}")
    def put_part(self, repo_id: str, oid: str, number: str) -> Reply:
        self._stored(repo_id)[f"{oid}/{number}"] = self.body
        return Reply(200, b"", {"ETag": f'"{hashlib.sha256(self.body).hexdigest()}"'})

    @route("POST", "/api/complete_multipart/{repo}/{}")
    def complete(self, repo_id: str, oid: str) -> Json:
        objects = self.server.repos[repo_id].objects
        whole = b"".join(objects[f"{oid}/{part['partNumber']}"] for part in self.json()["parts"])
        if hashlib.sha256(whole).hexdigest() != oid:
            raise Refusal(400, "The parts are not the object")
        objects[oid] = whole
        return {}

    @route("POST", "/api/models/{repo}/commit/{}")
    def commit(self, repo_id: str, revision: str) -> Json:
        repo, propose = self._repo(repo_id, "repo.write"), "create_pr" in self.query
        header, *operations = (json.loads(line) for line in self.body.splitlines())
        asked = header["value"]
        wanted, title, text = asked.get("parentCommit"), asked["summary"], asked.get("description", "")
        parent = repo.find(wanted if wanted and propose else revision)
        if wanted and not parent.startswith(wanted):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(repo.tree(parent))
        for operation in operations:
            _apply(operation["key"], operation["value"], tree, repo)
        url = f"{self.server.url}/{repo_id}"
        ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        if propose:
            number = repo.propose(parent, title)["num"]
            ref = f"refs/pr/{number}"
        elif ref not in repo.refs:
            raise Refusal(400, f"{revision} is neither a branch nor a pull request")
        oid = repo.record(ref, parent, tree, title, text)
        made = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "hookOutput": ""}
        return made | ({"pullRequestUrl": f"{url}/discussions/{number}"} if propose else {})

    # Pull requests.

    @route("GET", "/api/models/{repo}/discussions")
    def discussions(self, repo_id: str) -> Json:
        wanted = self.query.get("status", ["all"])[0]
        open_ones = {"open": (True,), "closed": (False,), "all": (True, False)}[wanted]
        found = [one for one in reversed(self._repo(repo_id).pulls) if (one["status"] == "open") in open_ones]
        start = int(self.query["p"][0]) * self.server.page
        return {"discussions": found[start : start + self.server.page], "count": len(found), "start": start}

    @route("GET", "/api/models/{repo}/discussions/([0-9]+)")
    def discussion(self, repo_id: str, number: str) -> Json:
        repo = self._repo(repo_id)
        one = repo.discussion(int(number))
        return one | {"filesWithConflicts": repo.merged(int(number))[1] if one["status"] == "open" else []}

    @route("POST", "/api/models/{repo}/discussions/([0-9]+)/(status|merge)")
    def change_discussion(self, repo_id: str, number: str, what: str) -> Json:
        repo = self._repo(repo_id, "repo.write")
        if what == "merge":
            repo.merge(int(number))
            return {}
        one = repo.discussion(int(number))
        one["status"] = self.json()["status"]
        event = {"id": "0" * 24, "type": "status-change", "createdAt": now(), "data": {"status": one["status"]}}
        return {"newStatus": event}

    # Collections.

    @route("GET", "/api/collections")
    def collections(self) -> Reply:
        owners = self.query.get("owner", [])
        found = [one for one in self.server.collections.values() if one["owner"]["name"] in owners]
        return self._page([{key: value for key, value in one.items() if key != "position"} for one in found])

    @route("POST", "/api/collections")
    def create_collection(self) -> Json:
        asked = self.json()
        self._need(asked["namespace"], "collection.write")
        words = re.sub("[^a-z0-9]+", "-", asked["title"].lower()).strip("-")
        slug = f"{asked['namespace']}/{words}-{hashlib.sha256(asked['title'].encode()).hexdigest()[:24]}"
        if slug in self.server.collections:
            raise Refusal(409, "This collection exists already", slug=slug)
        made = {"slug": slug, "title": asked["title"], "items": [], "owner": {"name": asked["namespace"]}}
        made |= {"private": asked.get("private", False), "lastUpdated": now(), "theme": "blue", "upvotes": 0}
        self.server.collections[slug] = made | {"position": 0}
        return self.collection(slug)

    @route("GET", "/api/collections/([^/]+/[^/]+)")
    def collection(self, slug: str) -> Json:
        if slug not in self.server.collections:
            raise Refusal(404, "Collection not found")
        return self.server.collections[slug]

    @route("POST", "/api/collections/([^/]+/[^/]+)/items")
    def add_item(self, slug: str) -> Json:
        collection, item = self.collection(slug), self.json()["item"]
        self._need(slug.split("/")[0], "collection.write")
        self._repo(item["id"])
        if any(one["id"] == item["id"] for one in collection["items"]):
            raise Refusal(409, "This item is in the collection already")
        position = len(collection["items"])
        collection["items"].append({"_id": f"{position:024x}", **item, "position": position})
        return collection

    # Downloads.

    @route("GET", "/{repo}/resolve/(refs/pr/[0-9]+|[^/]+)/(.+)")
    def resolve(self, repo_id: str, revision: str, path: str) -> Reply:
        repo = self._repo(repo_id)
        commit = repo.find(revision)
        headers, entry = {"X-Repo-Commit": commit}, repo.tree(commit).get(path)
        if entry is None:
            return Reply(404, {"error": "Entry not found"}, headers | {"X-Error-Code": "EntryNotFound"})
        if lfs := entry.get("lfs"):
            headers |= {"X-Linked-Size": str(lfs["size"]), "X-Linked-Etag": f'"{lfs["oid"]}"'}
            headers["Location"] = self.server.signed(f"/storage/{repo_id}/{lfs['oid']}")
            return Reply(302, b"", headers)
        return self._content(repo.objects[entry["oid"]], headers | {"ETag": f'"{entry["oid"]}"'})

    @route("GET", "/storage/{repo}/{}")
    def get(self, repo_id: str, oid: str) -> Reply:
        return self._content(self._stored(repo_id)[oid], {"ETag": f'"{oid}"'})

    def _content(self, content: bytes, headers: Mapping[str, str]) -> Reply:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return Reply(200, content, {**headers, "Accept-Ranges": "bytes"})
        start = int(asked[1])
        part = content[start : int(asked[2]) + 1 if asked[2] else None]
        if not part:
            return Reply(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        where = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
        return Reply(206, part, {**headers, "Content-Range": where})


def _listed(tree: Tree, paths: list[str]) -> list[Json]:
    """Files as listings tell of them."""
    return [{"type": "file", "path": path, **tree[path]} for path in paths if path in tree]


def _apply(key: str, asked: Json, tree: Tree, repo: Repository) -> None:
    """Do one operation of a commit."""
    path = asked["path"]
    if key == "file":
        tree[path] = repo.small(base64.b64decode(asked["content"]))
    elif key == "lfsFile":
        tree[path] = repo.large(asked["oid"], path)
    elif tree.pop(path, None) is None:
        raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
