"""A Hub of one's own: speaks to `huggingface_hub` what huggingface.co speaks, keeps everything below one folder.

    with HubStandIn(tmp_path / "hub") as hub:
        HfApi(endpoint=hub.url, token=hub.token).create_repo("my-org/model")

What it does not know it answers with 404. Large files lie at another host than the API (``localhost`` and
``127.0.0.1``), behind signed links, and that host refuses the Hub's token: as it is with the real one, without Xet.
`python -m tests.hub.standin ROOT PORT` starts it by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import yaml

from tests.hub.repository import Json, Refusal, Repository, front_matter, now, write_json

USER = "quant"
ORGANISATIONS = {"my-org": "admin", "read-org": "read"}
"""Whom the user belongs to, and as what."""


@dataclass
class Request:
    """A line of the log. ``status`` is 0 until there is an answer, and stays 0 where the connection broke."""

    method: str
    path: str
    received: int = 0
    status: int = 0


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests of a method whose path the pattern is found in.

    ``status`` is answered, after ``hold`` was set; ``drop`` breaks the connection after so many bytes of the
    request's body, or of the answer's where the request has none; ``lost``: it is done, the answer never arrives.
    ``reached`` is set when a request runs into it.
    """

    method: str
    path: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    retry_after: int | None = None
    drop: int | None = None
    lost: bool = False
    hold: threading.Event | None = None
    reached: threading.Event = field(default_factory=threading.Event)


class HubStandIn(ThreadingHTTPServer):
    """The server, in a thread of this process. ``lfs_above`` and ``part`` are bytes, ``page`` entries of a listing."""

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0, *, page: int = 3, lfs_above: int = 10**7, part: int = 2**22) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.root, self.page, self.lfs_above, self.part = root, page, lfs_above, part
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}"
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.RLock()
        self.open: set[socket.socket] = set()
        kept = root / "hub.json"
        self.state: Json = json.loads(kept.read_text()) if kept.exists() else {"tokens": {}, "collections": {}}
        self.repos = {path.parent.name: Repository(path.parent) for path in root.glob("repos/*/repo.json")}
        self.token = self.new_token("write")

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for fault in self.faults:
            if fault.hold:
                fault.hold.set()
        self.shutdown()
        self.server_close()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def new_token(self, role: str, **scoped: list[str]) -> str:
        """A token of the user: "read", "write", or "fineGrained" with the rights on each name.

        The same token for the same rights, whichever process made it: ``**{"my-org": ["repo.write"]}``.
        """
        value = "hf_" + hashlib.sha256(json.dumps([role, scoped]).encode()).hexdigest()[:34]
        self.state["tokens"][value] = {"role": role, "scoped": scoped}
        self.save()
        return value

    def repo(self, repo_id: str) -> Repository:
        """A repository as it lies on disk, for a test to look at or to change behind the client's back."""
        return self.repos[repo_id.replace("/", "--")]

    def sent(self, method: str, pattern: str) -> list[Request]:
        """Requests of a method whose path the pattern is found in, in their order."""
        return [one for one in self.requests if one.method == method and re.search(pattern, one.path)]

    def save(self) -> None:
        write_json(self.root / "hub.json", self.state)

    def signed(self, path: str) -> str:
        return f"{self.storage}{path}?signature={hashlib.sha256(f'{self.root}{path}'.encode()).hexdigest()[:16]}"

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


class _Dropped(Exception):  # noqa: N818 - it is meant
    """The connection broke, on purpose or by the client."""


_ROUTES: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = []
_Answer = TypeVar("_Answer", bound=Callable[..., Any])


def _route(method: str, pattern: str) -> Callable[[_Answer], _Answer]:
    """``{repo}`` is namespace/name, ``{}`` one part of the path: given to the method in this order, unquoted."""
    expression = pattern.replace("{repo}", "([^/]+/[^/]+?)").replace("{}", "([^/]+)")

    def add(answer: _Answer) -> _Answer:
        _ROUTES.append((method, re.compile(expression), answer))
        return answer

    return add


class _Handler(BaseHTTPRequestHandler):
    """One connection and every answer."""

    protocol_version = "HTTP/1.1"
    server: HubStandIn

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        """Requests are told in `HubStandIn.requests`."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.left = int(self.headers.get("Content-Length", 0))
        self.seen = Request(self.command, url.path)
        self.server.requests.append(self.seen)
        self.fault = self.server.fault_of(self.command, url.path)
        try:
            if fault := self.fault:
                fault.reached.set()
                if fault.hold:
                    fault.hold.wait()
                if fault.status:
                    raise Refusal(fault.status, "The stand-in was told to fail.")
                if fault.drop is not None and self.left:
                    self._read(min(fault.drop, self.left))
                    raise _Dropped
            wanted = "GET" if self.command == "HEAD" else self.command
            for method, pattern, answer in _ROUTES:
                if method == wanted and (found := pattern.fullmatch(url.path)):
                    value = answer(self, *(unquote(part) if part else part for part in found.groups()))
                    return self._reply(200, value) if value is not None else None
            raise Refusal(404, "Sorry, we can't find the page you are looking for.")
        except Refusal as refusal:
            self._refuse(refusal)
        except (_Dropped, ConnectionError):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - the base class's names

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Message": refusal.message, **({"X-Error-Code": refusal.code} if refusal.code else {})}
        if self.fault and self.fault.retry_after is not None:
            headers["Retry-After"] = str(self.fault.retry_after)
        self._reply(refusal.status, {"error": refusal.message, **refusal.body}, headers)

    def _read(self, count: int) -> bytes:
        data = self.rfile.read(count)
        self.left -= len(data)
        self.seen.received += len(data)
        if len(data) < count:
            raise _Dropped
        return data

    def _json(self) -> Any:
        return json.loads(self._read(self.left) or b"{}")

    def _reply(self, status: int, body: object = b"", headers: Mapping[str, str] | None = None) -> None:
        while self.left:  # what was not asked for is read all the same: the client would see a broken connection
            self._read(min(self.left, 2**20))
        if self.fault and self.fault.lost:
            raise _Dropped
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.seen.status = status
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = self.fault.drop if self.fault else None
            self.wfile.write(content[:cut])
            if cut is not None:
                raise _Dropped

    # Who asks, and for what.

    def _token(self) -> Json | None:
        value = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if value and value not in self.server.state["tokens"]:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.server.state["tokens"][value] if value else None

    def _may(self, right: str, name: str) -> bool:
        token, owner = self._token(), name.split("/")[0]
        if token is None or token["role"] == "read":
            return token is not None and right.endswith(".read") and (owner == USER or owner in ORGANISATIONS)
        if token["role"] == "fineGrained":
            rights = [one for scope in {name, owner, "global"} for one in token["scoped"].get(scope, [])]
            return right in rights or (right == "repo.content.read" and "repo.write" in rights)
        if right.endswith(".read"):
            return owner == USER or owner in ORGANISATIONS
        return right == "discussion.write" or owner == USER or ORGANISATIONS.get(owner) in ("admin", "write")

    def _need(self, right: str, name: str) -> str:
        """Nothing where the token gives the right, 401 or 403 where not; the user."""
        if self._token() is None:
            raise Refusal(401, "Invalid username or password.")
        if not self._may(right, name):
            raise Refusal(403, f"Forbidden: your token does not have the right {right} on {name}")
        return USER

    def _repo(self, repo_id: str, right: str = "repo.content.read") -> Repository:
        """A repository that the token may see, and use in this way."""
        token, repo = self._token(), self.server.repos.get(repo_id.replace("/", "--"))
        if repo is None or (repo.state["private"] and not self._may("repo.content.read", repo_id)):
            # The client reads 401 as "not found" over https alone; the code says it over http too.
            raise Refusal(404 if token else 401, "Repository not found", "RepoNotFound")
        if right != "repo.content.read":
            self._need(right, repo_id)
        return repo

    @_route("GET", "/api/whoami-v2")
    def whoami(self) -> Json:
        token = self._token()
        if token is None:
            raise Refusal(401, "Invalid username or password.")
        access: Json = {"displayName": "stand-in", "role": token["role"], "createdAt": now()}
        if token["role"] == "fineGrained":
            kinds = {name: "model" if "/" in name else "user" if name == USER else "org" for name in token["scoped"]}
            scoped = [
                {"entity": {"_id": name, "type": kind, "name": name}, "permissions": token["scoped"][name]}
                for name, kind in kinds.items()
                if name != "global"
            ]
            access["fineGrained"] = {"global": token["scoped"].get("global", []), "scoped": scoped}
        orgs = [{"type": "org", "name": name, "roleInOrg": role} for name, role in ORGANISATIONS.items()]
        auth = {"type": "access_token", "accessToken": access}
        return {"type": "user", "id": USER, "name": USER, "fullname": USER, "orgs": orgs, "auth": auth}

    # Repositories.

    @_route("POST", "/api/repos/create")
    def create(self) -> Json:
        asked = self._json()
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        self._need("repo.write", repo_id.split("/")[0])
        key, url = repo_id.replace("/", "--"), f"{self.server.url}/{repo_id}"
        with self.server.lock:
            if key in self.server.repos:
                raise Refusal(409, "You already created this model repo", url=url)
            folder, private = self.server.root / "repos" / key, asked.get("visibility") == "private"
            self.server.repos[key] = Repository.create(
                folder, repo_id, USER, private=private or bool(asked.get("private"))
            )
        return {"url": url, "name": repo_id}

    @_route("PUT", "/api/models/{repo}/settings")
    def settings(self, repo_id: str) -> Json:
        repo, asked = self._repo(repo_id, "repo.write"), self._json()
        if "visibility" in asked:
            repo.state["private"] = asked["visibility"] == "private"
        repo.state["gated"] = asked.get("gated", repo.state["gated"])
        repo.save()
        return {key: repo.state[key] for key in ("private", "gated")}

    @_route("GET", "/api/models/{repo}(?:/revision/{})?")
    def info(self, repo_id: str, revision: str | None) -> Json:
        repo = self._repo(repo_id)
        commit = repo.commits[repo.find(revision or "main")]
        card = commit["tree"].get("README.md")
        siblings: list[Json] = []
        for path, entry in commit["tree"].items():
            siblings.append({"rfilename": path})
            if "blobs" in self.query:
                siblings[-1] |= {"size": entry["size"], "blobId": entry["oid"]}
                if lfs := entry.get("lfs"):
                    siblings[-1]["lfs"] = {**lfs, "sha256": lfs["oid"]}
        known = {
            "author": repo_id.split("/")[0], "sha": commit["id"], "lastModified": commit["date"], "disabled": False,
            "private": repo.state["private"], "gated": repo.state["gated"], "createdAt": repo.state["created"],
            "siblings": siblings, "cardData": front_matter(repo.content_path(card).read_text()) if card else None,
        }  # fmt: skip
        return {"id": repo_id, **{key: known[key] for key in self.query.get("expand", known)}}

    @_route("GET", "/api/models/{repo}/refs")
    def refs(self, repo_id: str) -> Json:
        found: Json = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
        kinds = {"heads": "branches", "tags": "tags", "pr": "pullRequests"}
        for ref, oid in self._repo(repo_id).refs.items():
            _, kind, name = ref.split("/", 2)
            found[kinds[kind]].append({"name": name, "ref": ref, "targetCommit": oid})
        return found

    @_route("POST", "/api/models/{repo}/(branch|tag)/{}")
    def add_ref(self, repo_id: str, kind: str, name: str) -> Json:
        repo, asked = self._repo(repo_id, "repo.write"), self._json()
        start = name if kind == "tag" else asked.get("startingPoint", "main")
        ref = f"refs/tags/{asked['tag']}" if kind == "tag" else f"refs/heads/{name}"
        with repo.lock:
            if ref in repo.refs:
                raise Refusal(409, f"Reference already exists: {ref}")
            repo.refs[ref] = repo.find(start)
            repo.save()
        return {}

    @_route("DELETE", "/api/models/{repo}/(branch|tag)/{}")
    def delete_ref(self, repo_id: str, kind: str, name: str) -> Json:
        repo = self._repo(repo_id, "repo.write")
        with repo.lock:
            if (kind, name) == ("branch", "main"):
                raise Refusal(403, "The main branch cannot be deleted")
            if repo.refs.pop(f"refs/{'tags' if kind == 'tag' else 'heads'}/{name}", None) is None:
                raise Refusal(404, f"No {kind} {name}", "RevisionNotFound")
            repo.save()
        return {}

    def _page(self, entries: list[Any]) -> None:
        """One page, and where the next one is."""
        start = int(self.query.get("cursor", ["0"])[0])
        end, headers = start + self.server.page, {}
        if end < len(entries):
            query = urlencode([*((k, v) for k, vs in self.query.items() if k != "cursor" for v in vs), ("cursor", end)])
            headers["Link"] = f'<{self.server.url}{urlsplit(self.path).path}?{query}>; rel="next"'
        self._reply(200, entries[start:end], headers)

    @_route("GET", "/api/models/{repo}/commits/{}")
    def commits(self, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id)
        shown = ("id", "title", "message", "date")
        history = repo.history(repo.find(revision))
        self._page([{key: one[key] for key in shown} | {"authors": [{"user": one["author"]}]} for one in history])

    @_route("GET", "/api/models/{repo}/tree/{}(?:/(.+))?")
    def tree(self, repo_id: str, revision: str, folder: str | None) -> None:
        repo, prefix = self._repo(repo_id), f"{folder}/" if folder else ""
        entries = repo.entries(repo.find(revision), expand=self.query.get("expand") == ["true"])
        found = [one for path, one in entries.items() if path.startswith(prefix)]
        if folder and not found:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        deep = self.query.get("recursive") == ["true"]
        self._page([one for one in found if deep or "/" not in one["path"].removeprefix(prefix)])

    @_route("POST", "/api/models/{repo}/paths-info/{}")
    def paths_info(self, repo_id: str, revision: str) -> list[Json]:
        repo, asked = self._repo(repo_id), parse_qs(self._read(self.left).decode())
        entries = repo.entries(repo.find(revision), expand=asked.get("expand") == ["true"])
        return [entries[path] for path in asked["paths"] if path in entries]

    # Uploads.

    @_route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> Json:
        return _validate(self._json()["content"])

    @_route("POST", "/api/models/{repo}/preupload/{}")
    def preupload(self, repo_id: str, revision: str) -> Json:
        repo = self._repo(repo_id, "discussion.write" if "create_pr" in self.query else "repo.write")
        tree, files = repo.tree(repo.find(revision)), []
        for file in self._json()["files"]:
            path, there = file["path"], tree.get(file["path"])
            mode = "lfs" if repo.uses_lfs(path, file["size"], revision, self.server.lfs_above) else "regular"
            oid = there.get("lfs", there)["oid"] if there else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    @_route("POST", "/{repo}[.]git/info/lfs/objects/batch")
    def batch(self, repo_id: str) -> Json:
        repo, objects = self._repo(repo_id, "discussion.write"), []
        for one in self._json()["objects"]:
            oid, size = one["oid"], one["size"]
            objects.append({"oid": oid, "size": size})
            if repo.lfs_path(oid).exists():
                continue
            upload: Json = {"href": self.server.signed(f"/storage/{repo_id}/{oid}")}
            if size > self.server.part:
                key = uuid.uuid4().hex
                write_json(self.server.root / "parts" / key / "of.json", [repo_id, oid])
                count = -(-size // self.server.part)
                urls = {str(n): self.server.signed(f"/storage-part/{key}/{n}") for n in range(1, count + 1)}
                upload = {"href": f"{self.server.url}/api/complete_multipart?upload={key}"}
                upload["header"] = {"chunk_size": str(self.server.part), **urls}
            verify = {"href": f"{self.server.url}/{repo_id}.git/info/lfs/objects/verify"}
            objects[-1]["actions"] = {"upload": upload, "verify": verify}
        return {"transfer": "basic", "objects": objects}

    @_route("POST", "/{repo}[.]git/info/lfs/objects/verify")
    def verify(self, repo_id: str) -> Json:
        asked, repo = self._json(), self._repo(repo_id, "discussion.write")
        path = repo.lfs_path(asked["oid"])
        if not path.exists() or path.stat().st_size != asked["size"]:
            raise Refusal(404, f"No object {asked['oid']} of {asked['size']} bytes")
        return {}

    def _at_storage(self) -> None:
        path = urlsplit(self.path).path
        if "Authorization" in self.headers:
            raise Refusal(400, "Only one auth mechanism allowed")
        if self.server.signed(path).partition("?signature=")[2] not in self.query.get("signature", []):
            raise Refusal(403, "SignatureDoesNotMatch")

    def _receive(self, path: Path) -> str:
        """The body of a PUT in a file; its SHA-256."""
        digest = hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            while self.left:
                piece = self._read(min(self.left, 2**16))
                file.write(piece)
                digest.update(piece)
        return digest.hexdigest()

    @_route("PUT", "/storage/{repo}/{}")
    def put(self, repo_id: str, oid: str) -> None:
        self._at_storage()
        path = self.server.repo(repo_id).lfs_path(oid)
        partial = path.with_name(uuid.uuid4().hex)
        if self._receive(partial) != oid:
            partial.unlink()
            raise Refusal(400, "The provided 'x-amz-checksum-sha256' does not match what was computed.")
        partial.replace(path)
        self._reply(200, b"", {"ETag": f'"{oid}"'})

    @_route("PUT", "/storage-part/{}/{}")
    def put_part(self, key: str, number: str) -> None:
        self._at_storage()
        self._reply(200, b"", {"ETag": f'"{self._receive(self.server.root / "parts" / key / number)}"'})

    @_route("POST", "/api/complete_multipart")
    def complete(self) -> Json:
        folder = self.server.root / "parts" / self.query["upload"][0]
        repo_id, oid = json.loads((folder / "of.json").read_text())
        whole = b"".join((folder / str(part["partNumber"])).read_bytes() for part in self._json()["parts"])
        if hashlib.sha256(whole).hexdigest() != oid:
            raise Refusal(400, "The parts are not the object")
        path = self.server.repo(repo_id).lfs_path(oid)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole)
        return {}

    @_route("POST", "/api/models/{repo}/commit/{}")
    def commit(self, repo_id: str, revision: str) -> Json:
        create_pr = "create_pr" in self.query
        repo = self._repo(repo_id, "discussion.write" if create_pr else "repo.write")
        lines = [json.loads(line) for line in self._read(self.left).splitlines()]
        oid, pull = repo.commit(revision, lines, USER, create_pr=create_pr)
        url = f"{self.server.url}/{repo_id}"
        made = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "hookOutput": ""}
        return made | ({"pullRequestUrl": f"{url}/discussions/{pull}"} if pull else {})

    # Downloads.

    @_route("GET", "/{repo}/resolve/(refs/pr/[0-9]+|[^/]+)/(.+)")
    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self._repo(repo_id)
        if repo.state["gated"] and not self._may("repo.content.read", repo_id):
            raise Refusal(403 if self._token() else 401, f"Access to model {repo_id} is restricted.", "GatedRepo")
        oid = repo.find(revision)
        headers = {"X-Repo-Commit": oid}
        entry = repo.tree(oid).get(path)
        if entry is None:
            return self._reply(404, {"error": "Entry not found"}, {**headers, "X-Error-Code": "EntryNotFound"})
        if lfs := entry.get("lfs"):
            headers |= {"X-Linked-Size": str(lfs["size"]), "X-Linked-Etag": f'"{lfs["oid"]}"'}
            headers["Location"] = self.server.signed(f"/storage/{repo_id}/{lfs['oid']}")
            return self._reply(302, b"", headers)
        return self._content(repo.content_path(entry), {**headers, "ETag": f'"{entry["oid"]}"'})

    @_route("GET", "/storage/{repo}/{}")
    def get(self, repo_id: str, oid: str) -> None:
        self._at_storage()
        self._content(self.server.repo(repo_id).lfs_path(oid), {"ETag": f'"{oid}"'})

    def _content(self, path: Path, headers: Mapping[str, str]) -> None:
        content, asked = path.read_bytes(), re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._reply(200, content, {**headers, "Accept-Ranges": "bytes"})
        first, last = asked.groups()
        start = int(first) if first else max(len(content) - int(last), 0)
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        if start >= len(content):
            return self._reply(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        return self._reply(
            206, content[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
        )


def _validate(text: str) -> Json:
    """What `/api/validate-yaml` answers: the card's metadata can be read, and names what can be a name."""
    try:
        metadata = front_matter(text)
    except yaml.YAMLError as error:
        raise Refusal(400, "Invalid metadata", errors=[{"message": str(error)}], warnings=[]) from None
    if not isinstance(metadata, dict):
        return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]}
    bases = metadata.get("base_model", [])
    wrong = [
        one for one in ([bases] if isinstance(bases, str) else bases) if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", one)
    ]
    if wrong:
        message = f'"base_model" with value "{wrong[0]}" is not valid. Use a model id from https://hf.co/models.'
        raise Refusal(400, "Invalid metadata", errors=[{"message": message}], warnings=[])
    return {"errors": [], "warnings": []}


if __name__ == "__main__":
    HubStandIn(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
