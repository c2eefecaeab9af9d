"""What the Hub's stand-in answers: the part of the Hub's API that a publication and its readers use."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import yaml

from tests.hub.connection import ORGANISATIONS, USER, Connection, route
from tests.hub.repository import Json, Refusal, Repository, now, write_json


class Api(Connection):
    """A method for each kind of request."""

    @route("GET", "/api/whoami-v2")
    def whoami(self) -> Json:
        token = self._token()
        if token is None:
            raise Refusal(401, "Invalid username or password.")
        access: Json = {"displayName": "stand-in", "role": token["role"], "createdAt": now()}
        if token["role"] == "fineGrained":
            kinds = {name: "model" if "/" in name else "user" if name == USER else "org" for name in token["scoped"]}
            scopes = [
                {"entity": {"type": kinds[name], "name": name}, "permissions": rights}
                for name, rights in token["scoped"].items()
            ]
            access["fineGrained"] = {"global": [], "scoped": scopes}
        orgs = [{"type": "org", "name": name, "roleInOrg": role} for name, role in ORGANISATIONS.items()]
        return {"type": "user", "name": USER, "orgs": orgs, "auth": {"type": "access_token", "accessToken": access}}

    # Repositories.

    @route("POST", "/api/repos/create")
    def create(self) -> Json:
        asked = self._json()
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        self._need(repo_id.split("/")[0], "repo.write")
        url, private = f"{self.server.url}/{repo_id}", asked.get("private") or asked.get("visibility") == "private"
        with self.server.lock:
            if repo_id in self.server.repos:
                raise Refusal(409, "You already created this model repo", url=url)
            folder = self.server.root / "repos" / repo_id.replace("/", "--")
            self.server.repos[repo_id] = Repository.create(folder, repo_id, private=bool(private))
        return {"url": url, "name": repo_id}

    @route("PUT", "/api/models/{repo}/settings")
    def settings(self, repo_id: str) -> Json:
        repo, asked = self._repo(repo_id, "repo.write"), self._json()
        if "visibility" in asked:
            repo.state["private"] = asked["visibility"] == "private"
        repo.state["gated"] = asked.get("gated", repo.state["gated"])
        repo.save()
        return {key: repo.state[key] for key in ("private", "gated")}

    @route("GET", "/api/models/{repo}(?:/revision/{})?")
    def info(self, repo_id: str, revision: str | None) -> Json:
        repo = self._repo(repo_id)
        commit = repo.find(revision or "main")
        siblings: list[Json] = []
        for path, entry in repo.tree(commit).items():
            siblings.append({"rfilename": path})
            if "blobs" in self.query:
                lfs = {"lfs": {**entry["lfs"], "sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}
                siblings[-1] |= {"size": entry["size"], "blobId": entry["oid"], **lfs}
        known = {key: repo.state[key] for key in ("private", "gated", "createdAt")}
        date = repo.history(commit)[0]["date"]
        return known | {"id": repo_id, "sha": commit, "lastModified": date, "siblings": siblings}

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
        repo, asked = self._repo(repo_id, "repo.write"), self._json()
        start = name if kind == "tag" else asked.get("startingPoint", "main")
        ref = f"refs/tags/{asked['tag']}" if kind == "tag" else f"refs/heads/{name}"
        with repo.lock:
            if ref in repo.refs:
                raise Refusal(409, f"Reference already exists: {ref}")
            repo.git("update-ref", ref, repo.find(start))
        return {}

    @route("DELETE", "/api/models/{repo}/(branch|tag)/{}")
    def delete_ref(self, repo_id: str, kind: str, name: str) -> Json:
        repo = self._repo(repo_id, "repo.write")
        with repo.lock:
            if (kind, name) == ("branch", "main"):
                raise Refusal(403, "The main branch cannot be deleted")
            ref = f"refs/{'tags' if kind == 'tag' else 'heads'}/{name}"
            if ref not in repo.refs:
                raise Refusal(404, f"No {kind} {name}", "RevisionNotFound")
            repo.git("update-ref", "-d", ref)
        return {}

    def _page(self, entries: list[Any]) -> None:
        """One page, and where the next one is."""
        start = int(self.query.get("cursor", ["0"])[0])
        end, headers = start + self.server.page, {}
        if end < len(entries):
            query = urlencode([*((k, v) for k, vs in self.query.items() if k != "cursor" for v in vs), ("cursor", end)])
            headers["Link"] = f'<{self.server.url}{urlsplit(self.path).path}?{query}>; rel="next"'
        self._reply(200, entries[start:end], headers)

    @route("GET", "/api/models/{repo}/commits/{}")
    def commits(self, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id)
        self._page([one | {"authors": [{"user": one["author"]}]} for one in repo.history(repo.find(revision))])

    @route("GET", "/api/models/{repo}/tree/{}(?:/(.+))?")
    def tree(self, repo_id: str, revision: str, folder: str | None) -> None:
        repo, prefix = self._repo(repo_id), f"{folder}/" if folder else ""
        found = {path: one for path, one in repo.entries(repo.find(revision)).items() if path.startswith(prefix)}
        if folder and not found:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        deep = self.query.get("recursive") == ["true"]
        shown = [one for path, one in found.items() if deep or "/" not in path.removeprefix(prefix)]
        self._page(shown)

    @route("POST", "/api/models/{repo}/paths-info/{}")
    def paths_info(self, repo_id: str, revision: str) -> list[Json]:
        repo, asked = self._repo(repo_id), parse_qs(self._read(self.left).decode())
        entries = repo.entries(repo.find(revision))
        return [entries[path] for path in asked["paths"] if path in entries]

    # Uploads.

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> Json:
        """The metadata of a card can be read, and names what can be a name."""
        parts = self._json()["content"].split("---", 2)
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
        repo = self._repo(repo_id, "discussion.write" if "create_pr" in self.query else "repo.write")
        commit, files = repo.find(revision), []
        for file in self._json()["files"]:
            path, there = file["path"], repo.tree(commit).get(file["path"])
            mode = "lfs" if file["size"] > self.server.lfs_above or repo.uses_lfs(path, commit) else "regular"
            oid = there.get("lfs", there)["oid"] if there else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    @route("POST", "/{repo}[.]git/info/lfs/objects/batch")
    def batch(self, repo_id: str) -> Json:
        repo, objects = self._repo(repo_id, "repo.write", "discussion.write"), []
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

    @route("POST", "/{repo}[.]git/info/lfs/objects/verify")
    def verify(self, repo_id: str) -> Json:
        asked, repo = self._json(), self._repo(repo_id, "repo.write", "discussion.write")
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
        with path.open("wb") as file:
            while self.left:
                piece = self._read(min(self.left, 2**16))
                file.write(piece)
                digest.update(piece)
        return digest.hexdigest()

    @route("PUT", "/storage/{repo}/{}")
    def put(self, repo_id: str, oid: str) -> None:
        self._at_storage()
        path = self.server.repos[repo_id].lfs_path(oid)
        partial = path.with_name(uuid.uuid4().hex)
        if self._receive(partial) != oid:
            partial.unlink()
            raise Refusal(400, "The provided 'x-amz-checksum-sha256' does not match what was computed.")
        partial.replace(path)
        self._reply(200, b"", {"ETag": f'"{oid}"'})

    @route("PUT", "/storage-part/{}/{}")
    def put_part(self, key: str, number: str) -> None:
        self._at_storage()
        self._reply(200, b"", {"ETag": f'"{self._receive(self.server.root / "parts" / key / number)}"'})

    @route("POST", "/api/complete_multipart")
    def complete(self) -> Json:
        folder = self.server.root / "parts" / self.query["upload"][0]
        repo_id, oid = json.loads((folder / "of.json").read_text())
        whole = b"".join((folder / str(part["partNumber"])).read_bytes() for part in self._json()["parts"])
        if hashlib.sha256(whole).hexdigest() != oid:
            raise Refusal(400, "The parts are not the object")
        (folder / "whole").write_bytes(whole)
        (folder / "whole").replace(self.server.repos[repo_id].lfs_path(oid))
        return {}

    @route("POST", "/api/models/{repo}/commit/{}")
    def commit(self, repo_id: str, revision: str) -> Json:
        create_pr = "create_pr" in self.query
        repo = self._repo(repo_id, "discussion.write" if create_pr else "repo.write")
        header, *operations = (json.loads(line) for line in self._read(self.left).splitlines())
        oid, pull = repo.commit(revision, header["value"], operations, create_pr=create_pr)
        url = f"{self.server.url}/{repo_id}"
        made = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "hookOutput": ""}
        return made | ({"pullRequestUrl": f"{url}/discussions/{pull}"} if pull else {})

    # Discussions and pull requests.

    @route("GET", "/api/models/{repo}/discussions")
    def discussions(self, repo_id: str) -> Json:
        found = [
            one
            for one in reversed(self._repo(repo_id).state["discussions"])
            for state in ["open" if one["status"] in ("open", "draft") else "closed"]
            for kind in ["pull_request" if one["isPullRequest"] else "discussion"]
            if {state, "all"} & {*self.query.get("status", ["all"])}
            if {kind, "all"} & {*self.query.get("type", ["all"])}
        ]
        start = int(self.query["p"][0]) * self.server.page
        return {"discussions": found[start : start + self.server.page], "count": len(found), "start": start}

    @route("POST", "/api/models/{repo}/discussions")
    def discuss(self, repo_id: str) -> Json:
        repo, asked = self._repo(repo_id, "discussion.write"), self._json()
        base, status = ("refs/heads/main", "draft") if asked["pullRequest"] else (None, "open")
        with repo.lock:
            return {"num": repo.discuss(asked["title"], asked["description"], base=base, status=status)}

    @route("GET", "/api/models/{repo}/discussions/([0-9]+)")
    def discussion(self, repo_id: str, number: str) -> Json:
        repo = self._repo(repo_id)
        one = repo.discussion(int(number))
        live = one["isPullRequest"] and one["status"] in ("open", "draft")
        return one | {"filesWithConflicts": repo.changed(one)[1] if live else []}

    @route("POST", "/api/models/{repo}/discussions/([0-9]+)/(comment|status|merge)")
    def change_discussion(self, repo_id: str, number: str, what: str) -> Json:
        repo, asked = self._repo(repo_id, "repo.write" if what == "merge" else "discussion.write"), self._json()
        one, said = repo.discussion(int(number)), None
        if comment := asked.get("comment"):
            said = repo.event(one, "comment", edited=False, hidden=False, latest={"raw": comment})
        if what == "merge":
            repo.merge(int(number))
        if what == "status":
            one["status"] = asked["status"]
            return {"newStatus": repo.event(one, "status-change", status=asked["status"])}
        return {"newMessage": said}

    # Collections.

    @route("GET", "/api/collections")
    def collections(self) -> None:
        owners = self.query.get("owner", [])
        known = [{k: v for k, v in one.items() if k != "position"} for one in self.server.state["collections"].values()]
        self._page([one for one in known if not owners or one["owner"]["name"] in owners])

    @route("POST", "/api/collections")
    def create_collection(self) -> Json:
        asked = self._json()
        self._need(asked["namespace"], "collection.write")
        words = re.sub("[^a-z0-9]+", "-", asked["title"].lower()).strip("-")
        slug = f"{asked['namespace']}/{words}-{hashlib.sha256(asked['title'].encode()).hexdigest()[:24]}"
        if slug in self.server.state["collections"]:
            raise Refusal(409, "This collection exists already", slug=slug)
        made = {"slug": slug, "title": asked["title"], "description": asked.get("description"), "items": []}
        made |= {"owner": {"name": asked["namespace"]}, "private": asked.get("private", False), "lastUpdated": now()}
        self.server.state["collections"][slug] = made | {"position": 0, "theme": "blue", "upvotes": 0}
        self.server.save()
        return self.collection(slug)

    @route("GET", "/api/collections/([^/]+/[^/]+)")
    def collection(self, slug: str) -> Json:
        found: Json | None = self.server.state["collections"].get(slug)
        if found is None:
            raise Refusal(404, "Collection not found")
        return found

    @route("POST", "/api/collections/([^/]+/[^/]+)/items")
    def add_item(self, slug: str) -> Json:
        collection, asked = self.collection(slug), self._json()
        self._need(slug.split("/")[0], "collection.write")
        item, items = asked["item"], collection["items"]
        if item["type"] == "model":
            self._repo(item["id"])
        if any((one["id"], one["type"]) == (item["id"], item["type"]) for one in items):
            raise Refusal(409, "This item is in the collection already")
        note = {"note": {"text": asked["note"]}} if "note" in asked else {}
        items.append({"_id": f"{len(items):024x}", **item, "position": len(items), **note})
        self.server.save()
        return collection

    # Downloads.

    @route("GET", "/{repo}/resolve/(refs/pr/[0-9]+|[^/]+)/(.+)")
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
        return self._content(repo.content(entry), {**headers, "ETag": f'"{entry["oid"]}"'})

    @route("GET", "/storage/{repo}/{}")
    def get(self, repo_id: str, oid: str) -> None:
        self._at_storage()
        self._content(self.server.repos[repo_id].lfs_path(oid).read_bytes(), {"ETag": f'"{oid}"'})

    def _content(self, content: bytes, headers: Mapping[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
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
