"""A repository of the Hub's stand-in: commits, refs, discussions and objects, all of it below one folder.

repo.json       settings, commits with their whole trees, refs, discussions
blobs/SHA1      small files, by git's own hash of a blob
lfs/SHA256      large ones
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

_ATTRIBUTES = "".join(f"*.{kind} filter=lfs diff=lfs merge=lfs -text\n" for kind in ("safetensors", "bin", "gz", "zst"))

Json = dict[str, Any]
Tree = dict[str, Json]


class Refusal(Exception):  # noqa: N818 - it is an answer
    """An answer that is no success: a status, the sentence and the code that the client tells errors apart by."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: object) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


def write_json(path: Path, value: object) -> None:
    """The whole file or the one before it, whoever is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sha1(value: object) -> str:
    return hashlib.sha1(json.dumps(value).encode(), usedforsecurity=False).hexdigest()


def front_matter(text: str) -> Any:
    """The metadata of a card; None where there is none. Raises YAMLError."""
    parts = text.split("---", 2)
    return yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None


class Repository:
    """What `HfApi` sees of a repository; every change is on disk before it is answered."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.RLock()
        self.state: Json = json.loads((folder / "repo.json").read_text(encoding="utf-8"))
        self.commits: dict[str, Json] = self.state["commits"]
        self.refs: dict[str, str] = self.state["refs"]
        self.discussions: list[Json] = self.state["discussions"]

    @classmethod
    def create(cls, folder: Path, repo_id: str, author: str, *, private: bool) -> Repository:
        state = {"id": repo_id, "private": private, "gated": False, "created": now()}
        write_json(folder / "repo.json", {**state, "commits": {}, "refs": {}, "discussions": []})
        made, tree = cls(folder), {}
        made._add(tree, ".gitattributes", _ATTRIBUTES.encode())
        made.refs["refs/heads/main"] = made._record(tree, None, "initial commit", "", author)
        made.save()
        return made

    def save(self) -> None:
        write_json(self.folder / "repo.json", self.state)

    def lfs_path(self, sha256: str) -> Path:
        return self.folder / "lfs" / sha256

    def content_path(self, entry: Json) -> Path:
        return self.lfs_path(entry["lfs"]["oid"]) if "lfs" in entry else self.folder / "blobs" / entry["oid"]

    def find(self, revision: str) -> str:
        """The commit that a branch, a tag, a pull request's ref or (seven characters of) a commit means."""
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in self.refs:
                return self.refs[name]
        found = [oid for oid in self.commits if len(revision) >= 7 and oid.startswith(revision)]
        if len(found) != 1:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def tree(self, oid: str) -> Tree:
        tree: Tree = self.commits[oid]["tree"]
        return tree

    def history(self, oid: str | None) -> Iterator[Json]:
        while oid is not None:
            commit = self.commits[oid]
            yield commit
            oid = commit["parent"]

    def uses_lfs(self, path: str, size: int, revision: str, limit: int) -> bool:
        """As the repository's .gitattributes say, and for all that is too large to lie in git."""
        entry = self.tree(self.find(revision)).get(".gitattributes")
        lines = self.content_path(entry).read_text(encoding="utf-8").splitlines() if entry else []
        patterns = [line.split()[0] for line in lines if "filter=lfs" in line.split()]
        return size > limit or any(
            fnmatch.fnmatch(path if "/" in pattern else path.rpartition("/")[2], pattern) for pattern in patterns
        )

    def commit(self, revision: str, lines: list[Json], author: str, *, create_pr: bool) -> tuple[str, int | None]:
        """One commit from the lines of a request; its id, and the number of the pull request that it opened."""
        header, *operations = (line["value"] | {"key": line["key"]} for line in lines)
        wanted = header.get("parentCommit")
        with self.lock:
            parent = self.find(wanted if wanted and create_pr else revision)
            if wanted and not parent.startswith(wanted):
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(self.tree(parent))
            for operation in operations:
                self._apply(tree, operation)
            ref, pull = revision if revision.startswith("refs/") else f"refs/heads/{revision}", None
            if create_pr:
                pull = self.discuss(header["summary"], header.get("description", ""), author, base=ref, status="open")
                ref = f"refs/pr/{pull['num']}"
            elif ref not in self.refs:
                raise Refusal(400, f"{revision} is neither a branch nor a pull request")
            oid = self.refs[ref] = self._record(tree, parent, header["summary"], header.get("description", ""), author)
            for one in self.discussions:
                if ref == f"refs/pr/{one['num']}":
                    self.event(one, "commit", author, subject=header["summary"], oid=oid)
            self.save()
        return oid, pull["num"] if pull else None

    def _record(self, tree: Tree, parent: str | None, title: str, message: str, author: str) -> str:
        commit = {"title": title, "message": message, "author": author, "date": now(), "parent": parent, "tree": tree}
        oid = _sha1([commit, len(self.commits)])
        self.commits[oid] = {"id": oid, **commit}
        return oid

    def _add(self, tree: Tree, path: str, content: bytes, **lfs: Json) -> None:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()  # as git does
        kept = self.folder / "blobs" / oid
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(content)
        tree[path] = {"oid": oid, "size": lfs["lfs"]["size"] if lfs else len(content), **lfs}

    def _apply(self, tree: Tree, operation: Json) -> None:
        path = operation["path"]
        match operation["key"]:
            case "file":
                self._add(tree, path, base64.b64decode(operation["content"]))
            case "lfsFile":
                large = self.lfs_path(operation["oid"])
                if not large.is_file():
                    raise Refusal(400, f"An LFS pointer pointed to a file that does not exist. Offending file: {path}")
                size = large.stat().st_size
                pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{large.name}\nsize {size}\n".encode()
                self._add(tree, path, pointer, lfs={"oid": large.name, "size": size, "pointerSize": len(pointer)})
            case "deletedFile" | "deletedFolder" as key:
                gone = [name for name in tree if name == path or (key.endswith("r") and name.startswith(path))]
                if not gone:
                    raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                for name in gone:
                    del tree[name]
            case other:
                raise Refusal(400, f"Unknown operation {other}")

    def entries(self, oid: str, *, expand: bool = False) -> Tree:
        """Files and folders of a commit by their paths, as the API tells of them."""
        tree, found = self.tree(oid), {}
        for path, entry in tree.items():
            found[path] = {"type": "file", "path": path, **entry}
            if expand:
                found[path]["lastCommit"] = self._last_change(oid, path)
            parts = path.split("/")[:-1]
            for folder in ("/".join(parts[:count]) for count in range(1, len(parts) + 1)):
                below = sorted((name, one["oid"]) for name, one in tree.items() if name.startswith(f"{folder}/"))
                digest = _sha1(below)
                found[folder] = {"type": "directory", "path": folder, "oid": digest, "size": 0}
        return dict(sorted(found.items()))

    def _last_change(self, oid: str, path: str) -> Mapping[str, str]:
        entry, last = self.tree(oid)[path], self.commits[oid]
        for commit in self.history(oid):
            if commit["tree"].get(path) != entry:
                break
            last = commit
        return {key: last[key] for key in ("id", "title", "date")}

    def discuss(self, title: str, text: str, author: str, *, base: str | None, status: str) -> Json:
        """A new discussion; with a ``base``, a pull request against that branch."""
        number = len(self.discussions) + 1
        one = {"num": number, "title": title, "status": status, "author": {"name": author}, "createdAt": now()}
        one |= {"isPullRequest": base is not None, "repo": {"name": self.state["id"], "type": "model"}, "events": []}
        if base is not None:
            one["changes"] = {"base": base}
            self.refs[f"refs/pr/{number}"] = self.refs[base]
        self.discussions.append(one)
        self.event(one, "comment", author, edited=False, hidden=False, latest={"raw": text})
        return one

    def discussion(self, number: int) -> Json:
        if not 0 < number <= len(self.discussions):
            raise Refusal(404, f"Discussion {number} not found")
        return self.discussions[number - 1]

    def event(self, discussion: Json, kind: str, author: str, **data: object) -> Json:
        happened = {"id": f"{len(discussion['events']):024x}", "type": kind, "createdAt": now(), "data": data}
        discussion["events"].append(happened | {"author": {"name": author}})
        return happened

    def conflicts(self, pull: Json) -> list[str]:
        """Files that both sides changed since the pull request left its branch, and not in the same way."""
        start, ours, theirs = self._sides(pull)
        names = sorted({*start, *ours, *theirs})
        return [name for name in names if len({str(tree.get(name)) for tree in (start, ours, theirs)}) == 3]

    def _sides(self, pull: Json) -> tuple[Tree, Tree, Tree]:
        ours, theirs = self.refs[pull["changes"]["base"]], self.refs[f"refs/pr/{pull['num']}"]
        known = {commit["id"] for commit in self.history(ours)}
        start = next(commit["id"] for commit in self.history(theirs) if commit["id"] in known)
        return self.tree(start), self.tree(ours), self.tree(theirs)

    def merge(self, number: int, author: str) -> None:
        """One commit on the branch with all that the pull request changed, as the Hub squashes them."""
        with self.lock:
            pull = self.discussion(number)
            if not pull["isPullRequest"] or pull["status"] != "open":
                raise Refusal(400, f"Discussion {number} is no open pull request")
            if conflicts := self.conflicts(pull):
                raise Refusal(409, f"The pull request has conflicts: {', '.join(conflicts)}")
            start, ours, theirs = self._sides(pull)
            changed = [name for name in {*start, *theirs} if start.get(name) != theirs.get(name)]
            tree = {name: entry for name, entry in ours.items() if name not in changed}
            tree |= {name: theirs[name] for name in changed if name in theirs}
            base = pull["changes"]["base"]
            oid = self._record(dict(sorted(tree.items())), self.refs[base], f"{pull['title']} (#{number})", "", author)
            self.refs[base] = pull["changes"]["mergeCommitId"] = oid
            pull["status"] = "merged"
            self.event(pull, "status-change", author, status="merged")
            self.save()
